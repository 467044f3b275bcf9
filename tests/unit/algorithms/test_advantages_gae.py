"""GAE and the value model's terms against hand-worked numbers and a loop in float64."""

import numpy as np
import pytest
import torch

from triune import registry
from triune.algorithms import Divider, MicroBatch, Progress
from triune.algorithms.advantages.gae import GAE
from triune.algorithms.critics.value_model import ValueModel
from triune.records import Source
from triune.testing.batches import Leaf, random_rows

NUM = 8


def one_rank(vector):
    return vector


def batch_of(values, rewards, mask=None, **streams):
    """Padded rows: values [B, T], one reward per row, all tokens trained unless `mask` says otherwise."""
    values = torch.tensor(values)
    mask = torch.ones(values.shape, dtype=torch.bool) if mask is None else torch.tensor(mask)
    return MicroBatch(
        tokens=torch.zeros(values.shape, dtype=torch.long),
        action_mask=mask,
        streams={"values": values, **{name: torch.tensor(value) for name, value in streams.items()}},
        rewards=torch.tensor(rewards),
    )


def advantages(batch, **options):
    (found,) = GAE(**{"whiten": False, **options}).over_batch([batch], one_rank, len(batch.rewards))
    return found["advantages"], found["returns"]


def loop(rewards, values, gamma, lam, after_last=0.0):
    """One sequence, as the paper's sum reads."""
    ends = [*values[1:], after_last]
    surprises = [r + gamma * n - v for r, n, v in zip(rewards, ends, values, strict=True)]
    return [sum((gamma * lam) ** k * s for k, s in enumerate(surprises[t:])) for t in range(len(values))]


def test_three_tokens_by_hand():
    made, returns = advantages(batch_of([[0.5, 0.25, 1.0]], [1.0]), gamma=0.5, lam=0.5)
    # surprises: 0.5 x 0.25 - 0.5 = -0.375, 0.5 x 1 - 0.25 = 0.25, 1 - 1 = 0
    assert made.tolist() == [[-0.375 + 0.25 * 0.25, 0.25, 0.0]]
    assert returns.tolist() == [[0.1875, 0.5, 1.0]]


def test_with_gamma_and_lambda_1_it_is_the_reward_minus_the_value():
    made, returns = advantages(batch_of([[0.5, 0.25, -2.0], [0.0, 3.0, 0.5]], [1.0, -1.0]))
    assert made.tolist() == [[0.5, 0.75, 3.0], [-1.0, -4.0, -1.5]]
    assert returns.tolist() == [[1.0] * 3, [-1.0] * 3]


def test_with_lambda_0_it_is_the_error_of_one_step():
    made, _ = advantages(batch_of([[0.5, 0.25, -2.0]], [1.0]), gamma=0.5, lam=0.0)
    assert made.tolist() == [[0.125 - 0.5, -1.0 - 0.25, 1.0 + 2.0]]


def test_what_tools_say_between_turns_is_skipped():
    mask = [[False, True, False, False, True, True, False]]
    made, returns = advantages(batch_of([[9.0, 0.5, 9.0, 9.0, 0.25, 1.0, 9.0]], [1.0], mask), gamma=0.5, lam=0.5)
    assert made.tolist() == [[0.0, -0.3125, 0.0, 0.0, 0.25, 0.0, 0.0]]
    assert returns.tolist() == [[0.0, 0.1875, 0.0, 0.0, 0.5, 1.0, 0.0]]


def test_token_rewards_add_to_the_reward():
    batch = batch_of([[0.0, 0.0, 0.0]], [1.0], token_rewards=[[-0.5, 0.25, -0.25]])
    assert advantages(batch)[0].tolist() == [[0.5, 1.0, 0.75]]


def test_a_rollout_that_was_cut_off_goes_on_with_the_critics_last_word_when_told():
    batch = batch_of([[0.5, 0.25], [0.5, 0.25]], [1.0, 1.0], truncated=[[1.0, 1.0], [0.0, 0.0]])
    made, _ = advantages(batch, truncated="bootstrap", gamma=0.5, lam=0.0)
    assert made.tolist() == [[0.125 - 0.5, 1.0 + 0.125 - 0.25], [0.125 - 0.5, 1.0 - 0.25]]
    assert advantages(batch, gamma=0.5, lam=0.0)[0].tolist()[0] == [0.125 - 0.5, 1.0 - 0.25]
    assert GAE().needs == {"values"}
    assert GAE(truncated="bootstrap").needs == {"values", "truncated"}


def test_a_rollout_without_a_reward_is_neither_blamed_nor_learnt_from():
    batch = batch_of([[0.5, 0.25], [0.0, 1.0]], [float("nan"), 2.0])
    for lam in (0.0, 0.7, 1.0):
        made, returns = advantages(batch, lam=lam)
        assert made[0].tolist() == [0.0, 0.0]
        assert returns[0].isnan().all()
        assert made[1, 1] == 1.0
    whitened, _ = advantages(batch, whiten=True)
    assert whitened[0].tolist() == [0.0, 0.0]
    assert whitened[1].tolist() == pytest.approx([1.0, -1.0], abs=1e-6)


def test_whitening_is_over_the_tokens_of_all_micro_batches_and_leaves_returns_alone():
    batches = [batch_of([[0.0, 0.0], [1.0, 0.0]], [1.0, 0.0]), batch_of([[0.0]], [3.0])]
    found = GAE().over_batch(batches, one_rank, 3)  # advantages 1, 1, -1, 0 and 3: mean 0.8, variance 1.76
    got = torch.cat([one["advantages"].flatten() for one in found]).tolist()
    assert got == pytest.approx([(value - 0.8) / 1.76**0.5 for value in (1, 1, -1, 0, 3)], rel=1e-5)
    assert torch.cat([one["returns"].flatten() for one in found]).tolist() == [1, 1, 0, 0, 3]
    equal = GAE().over_batch([batch_of([[0.1, 0.1]], [0.4])], one_rank, 1)
    assert equal[0]["advantages"].tolist() == [[0.0, 0.0]]


ROWS = random_rows(NUM, seed=5)
for number, row in enumerate(ROWS):
    chance, row.source = np.random.default_rng(number), Source.POLICY
    row.streams.update({"values": chance.normal(size=len(row)), "token_rewards": chance.normal(size=len(row))})
    row.streams["truncated"] = np.full(len(row), number % 3 == 0, float)
LAYOUTS = {
    "whole": lambda leaf: [leaf.padded(range(NUM))],
    "wide": lambda leaf: [leaf.padded(range(NUM), width=40, extra_rows=2, fill=np.nan)],
    "split": lambda leaf: [leaf.padded(range(3)), leaf.padded([7, 5]), leaf.padded([3, 4, 6])],
    "packed": lambda leaf: [leaf.packed([4, 0, 3], tail=3, fill=np.nan), leaf.packed([1, 2, 7, 6, 5])],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("gamma", "lam", "truncated"), [(1, 1, "end"), (0.9, 0.6, "bootstrap"), (0.97, 0, "end")])
def test_every_layout_agrees_with_a_loop_over_single_sequences(layout, gamma, lam, truncated):
    """Micro-batches name their sequences by what each was rewarded with."""
    brick = GAE(gamma=gamma, lam=lam, truncated=truncated, whiten=False)
    seen = 0
    batches = LAYOUTS[layout](Leaf(ROWS))
    for batch, made in zip(batches, brick.over_batch(batches, one_rank, NUM), strict=True):
        assert not made["advantages"][~batch.action_mask].any()
        numbers = batch.spread(torch.arange(batch.num_sequences))
        for sequence, reward in enumerate(batch.rewards.tolist()):
            chosen = batch.action_mask & (numbers == sequence)
            if not chosen.any():
                continue
            row = next(row for row in ROWS if abs(row.reward - reward) < 1e-6)
            values, rewards = row.streams["values"][row.action_mask], row.streams["token_rewards"][row.action_mask]
            rewards = rewards + np.append(np.zeros(len(rewards) - 1), row.reward)
            is_cut = truncated == "bootstrap" and row.streams["truncated"][0] > 0
            want = np.array(loop(rewards, values, gamma, lam, values[-1] if is_cut else 0.0))
            np.testing.assert_allclose(made["advantages"][chosen].numpy(), want, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(made["returns"][chosen].numpy(), want + values, rtol=1e-5, atol=1e-5)
            seen += 1
    assert seen == sum(row.action_mask.any() for row in ROWS)


# ----------------------------------------------------------------------------------------------- the value model


class Only:
    """A critic brick as all the terms there are."""

    def __init__(self, brick):
        self.brick, self.needs = brick, brick.needs

    def terms(self, batch, state, progress):
        return self.brick(batch, state, progress)


def value_update(brick, batches, new):
    """Metrics and gradient of one update, for new values [B, T] of each micro-batch."""
    leaves = [torch.tensor(value, dtype=torch.float32, requires_grad=True) for value in new]
    divider = Divider(Only(brick), batches, state={}, progress=Progress())
    for batch, leaf in zip(batches, leaves, strict=True):
        divider.loss(batch.with_values(leaf)).backward()
    return divider.metrics(), [leaf.grad for leaf in leaves]


def test_the_value_loss_is_half_the_squared_error_per_token():
    batch = batch_of([[0.0, 0.0], [0.0, 0.0]], [0.0, 0.0], returns=[[1.0, 1.0], [0.0, 3.0]])
    metrics, (gradient,) = value_update(ValueModel(), [batch], [[[0.0, 2.0], [0.0, 0.0]]])
    assert metrics["value_loss"] == (1 + 1 + 0 + 9) / 2 / 4
    assert metrics["return_mean"] == 1.25
    assert gradient.tolist() == [[-0.25, 0.25], [0.0, -0.75]]


def test_the_clip_takes_the_larger_loss_so_that_a_value_that_has_moved_enough_rests():
    batch = batch_of([[0.0, 0.0, 0.0]], [0.0], returns=[[1.0, 1.0, 1.0]])
    metrics, (gradient,) = value_update(ValueModel(value_clip=0.2), [batch], [[[0.1, 0.5, -0.5]]])
    # 0.1 is inside; 0.5 counts as 0.2, where the slope is 0; -0.5 is worse than its bound, so it is pulled back
    assert metrics["value_loss"] == pytest.approx((0.9**2 + 0.8**2 + 1.5**2) / 2 / 3)
    assert gradient.tolist()[0] == pytest.approx([-0.3, 0.0, -0.5])
    assert metrics["value_clip_ratio"] == pytest.approx(1 / 3)


def test_explained_variance_is_numpys_however_the_update_is_split():
    chance = np.random.default_rng(3)
    values, returns = chance.normal(size=(6, 5)).astype(np.float32), chance.normal(3, 2, (6, 5)).astype(np.float32)
    mask = chance.random((6, 5)) < 0.7
    error = returns[mask].astype(float) - values[mask]
    want = 1 - np.var(error) / np.var(returns[mask].astype(float))
    for cuts in ([], [2], [1, 2, 5]):
        parts = np.split(np.arange(6), cuts)
        batches = [batch_of(values[p], np.zeros(len(p)), mask[p], returns=returns[p]) for p in parts]
        metrics, _ = value_update(ValueModel(), batches, [values[p] for p in parts])
        shown = ValueModel().summarise(metrics)
        assert shown["explained_variance"] == pytest.approx(want, rel=1e-9)
        assert not {"value_error", "value_error_square", "return_square"} & shown.keys()


def test_explained_variance_is_left_out_where_all_returns_are_equal():
    batch = batch_of([[0.0, 0.3]], [0.0], returns=[[0.1, 0.1]])
    metrics, _ = value_update(ValueModel(), [batch], [[[0.0, 0.0]]])
    assert "explained_variance" not in ValueModel().summarise(metrics)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_an_unknown_return_trains_nothing(clip):
    batch = batch_of([[0.0, 0.0]], [0.0], returns=[[float("nan"), 1.0]])
    metrics, (gradient,) = value_update(ValueModel(value_clip=clip), [batch], [[[5.0, 0.0]]])
    assert metrics["value_loss"] == 0.5
    assert gradient.tolist() == [[0.0, -1.0]]


def test_gae_is_found_by_name_and_refuses_a_discount_above_1():
    assert registry.build("advantage", {"use": "gae", "lam": 0.95}, "x") == GAE(lam=0.95)
    with pytest.raises(Exception, match=r"x\.gamma"):
        registry.build("advantage", {"use": "gae", "gamma": 1.1}, "x")
