"""Every loss brick against an independent float64 reference, finite differences and a bandit."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from triune.algorithms import Algorithm, Constant, Divider, MicroBatch, Progress, Term
from triune.algorithms.entropies.bonus import Bonus
from triune.algorithms.kls.k1 import K1
from triune.algorithms.kls.k2 import K2
from triune.algorithms.kls.k3 import K3
from triune.algorithms.policy_losses.ppo_clip import PPOClip
from triune.algorithms.policy_losses.reinforce import Reinforce
from triune.algorithms.policy_losses.sft import SFT
from triune.algorithms.policy_losses.sppo import SPPO
from triune.errors import TrainingError
from triune.records import Source
from triune.testing.batches import Leaf, Row, random_rows

ROWS = random_rows(9, seed=3)


@dataclass(frozen=True)
class Silent:
    """A policy loss without terms, so that other bricks can be seen alone."""

    needs = frozenset()

    def __call__(self, batch, state, progress):
        return []


def run(algorithm, *batches):
    """Loss with gradient, and metrics, of one update."""
    divider = Divider(algorithm, batches, state=algorithm.state0(), progress=Progress())
    loss = sum(divider.loss(batch) for batch in batches)
    return loss, divider.metrics()


def tokens_of(rows, missing="exclude"):
    """Every trained token as (row, position, new, behaviour, reference, advantage), behaviour new where unknown."""
    for number, row in enumerate(rows):
        for t in np.flatnonzero(row.action_mask):
            behaviour = row.streams["behaviour_logprobs"][t]
            if np.isnan(behaviour):
                if missing == "exclude":
                    continue
                behaviour = row.logprobs[t]
            yield number, t, row.logprobs[t], behaviour, row.streams["ref_logprobs"][t], row.streams["advantages"][t]


def average(per_token, mode, length=None):
    """Average {(row, t): value} the slow way."""
    by_row = {}
    for (row, _), value in per_token.items():
        by_row.setdefault(row, []).append(value)
    if mode == "token":
        return sum(per_token.values()) / len(per_token)
    if mode == "sequence":
        return sum(sum(row) / len(row) for row in by_row.values()) / len(by_row)
    total = sum(sum(row) for row in by_row.values()) / len(by_row)
    return total / length if mode == "constant" else total


PPO_CASES = [
    PPOClip(),
    PPOClip(clip_low=0.1, clip_high=0.3),
    PPOClip(dual_clip=1.3),
    PPOClip(average="sequence"),
    PPOClip(average="sequence_sum"),
    PPOClip(average="constant", length=7),
    PPOClip(missing_behaviour="use_old"),
]


@pytest.mark.parametrize("brick", PPO_CASES, ids=str)
def test_ppo_clip_agrees_with_a_slow_reference(brick):
    losses, ratios, clipped = {}, [], []
    for row, t, new, behaviour, _, advantage in tokens_of(ROWS, brick.missing_behaviour):
        ratio = math.exp(new - behaviour)
        kept = min(max(ratio, 1 - brick.clip_low), 1 + brick.clip_high)
        loss = -min(ratio * advantage, kept * advantage)
        is_clipped = kept * advantage < ratio * advantage
        if brick.dual_clip and advantage < 0 and loss > -brick.dual_clip * advantage:
            loss, is_clipped = -brick.dual_clip * advantage, True
        losses[row, t] = loss
        ratios.append(ratio)
        clipped.append(is_clipped)
    leaf = Leaf(ROWS, torch.float64)
    loss, metrics = run(Algorithm(policy_loss=brick), leaf.padded(range(9)))
    assert 0 < np.mean(clipped) < 1
    assert loss.item() == pytest.approx(average(losses, brick.average, brick.length), rel=1e-12)
    assert metrics["policy_loss"] == pytest.approx(loss.item(), rel=1e-12)
    assert metrics["ratio_mean"] == pytest.approx(np.mean(ratios), rel=1e-12)
    assert metrics["clip_ratio"] == pytest.approx(np.mean(clipped), rel=1e-12)


@pytest.mark.parametrize("mode", ["token", "sequence", "sequence_sum", "constant"])
def test_reinforce_and_sft_agree_with_a_slow_reference(mode):
    length = 11 if mode == "constant" else None
    leaf, every = Leaf(ROWS, torch.float64), list(tokens_of(ROWS, "use_old"))
    loss, _ = run(Algorithm(policy_loss=Reinforce(average=mode, length=length)), leaf.padded(range(9)))
    expected = average({(row, t): -advantage * new for row, t, new, _, _, advantage in every}, mode, length)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    loss, _ = run(
        Algorithm(policy_loss=SFT(sources=(Source.EXPERT,), average=mode, length=length)), leaf.padded(range(9))
    )
    imitated = {(row, t): -new for row, t, new, *_ in every if ROWS[row].source is Source.EXPERT}
    assert loss.item() == pytest.approx(average(imitated, mode, length), rel=1e-12)


def test_kl_and_entropy_agree_with_hand_numbers():
    policy, reference, entropy = math.log(0.5), math.log(0.25), 0.75
    row = Row(np.array([False, True]), {"ref_logprobs": np.full(2, reference)}, np.full(2, policy), np.full(2, entropy))
    expected = {K1: math.log(2), K2: math.log(2) ** 2 / 2, K3: 0.5 - 1 + math.log(2)}
    for kind, value in expected.items():
        loss, metrics = run(
            Algorithm(policy_loss=Silent(), kl=kind(coefficient=0.1)), Leaf([row], torch.float64).padded([0])
        )
        assert loss.item() == pytest.approx(0.1 * value)
        assert metrics["kl"] == pytest.approx(value)
    bonus = Algorithm(policy_loss=Silent(), entropy=Bonus(coefficient=0.01))
    loss, metrics = run(bonus, Leaf([row], torch.float64).padded([0]))
    assert loss.item() == pytest.approx(-0.0075)
    assert metrics["entropy"] == pytest.approx(0.75)


def test_case_32_the_kl_metric_ignores_its_coefficient_and_padding():
    found = []
    for coefficient, width, fill in [(0.0, 0, 0.0), (0.5, 40, 1e6)]:
        algorithm = Algorithm(policy_loss=Silent(), kl=K3(coefficient=coefficient))
        found.append(run(algorithm, Leaf(ROWS).padded(range(9), width=width, fill=fill))[1]["kl"])
    assert found[0] == found[1] > 0


def test_case_28_a_flat_group_pushes_kl_unless_it_is_switched_off():
    rows = random_rows(6, seed=1, missing=0.0)
    for row in rows[:2]:
        row.streams["advantages"][:] = 0.0
    for brick, expects_push in [(K2(on_flat_groups=True), True), (K2(on_flat_groups=False), False)]:
        leaf = Leaf(rows)
        run(Algorithm(policy_loss=Silent(), kl=brick), leaf.padded(range(6)))[0].backward()
        first = leaf.logprobs.grad[: len(rows[0]) + len(rows[1])]
        assert bool(first.abs().sum() > 0) is expects_push
        assert leaf.logprobs.grad.abs().sum() > 0


def test_case_01_an_unmodified_policy_has_ratio_one_and_no_gap():
    rows = random_rows(6, seed=2)
    for row in rows:
        row.streams["behaviour_logprobs"] = row.logprobs.copy()
    _, metrics = run(Algorithm(policy_loss=PPOClip()), Leaf(rows).padded(range(6)))
    assert metrics["ratio_mean"] == 1.0
    assert metrics["clip_ratio"] == 0.0
    assert metrics["logprob_gap"] == 0.0


def test_case_03_tokens_without_behaviour_leave_ratio_terms_and_are_counted():
    leaf = Leaf(ROWS)
    _, metrics = run(Algorithm(policy_loss=PPOClip()), leaf.padded(range(9)))
    missing = sum(int((np.isnan(row.streams["behaviour_logprobs"]) & row.action_mask).sum()) for row in ROWS)
    assert metrics["tokens_without_behaviour"] == missing > 0
    run(Algorithm(policy_loss=PPOClip()), leaf.padded(range(9)))[0].backward()
    unknown = np.concatenate([np.isnan(row.streams["behaviour_logprobs"]) for row in ROWS])
    assert (leaf.logprobs.grad[torch.tensor(unknown)] == 0).all()
    assert leaf.logprobs.grad.isfinite().all()
    leaf = Leaf(ROWS)
    run(Algorithm(policy_loss=PPOClip(missing_behaviour="use_old")), leaf.padded(range(9)))[0].backward()
    trained = np.concatenate([np.isnan(row.streams["behaviour_logprobs"]) & row.action_mask for row in ROWS])
    assert (leaf.logprobs.grad[torch.tensor(trained)] != 0).all()


def test_recomputed_old_logprobs_replace_the_behaviour_in_ratios_but_not_in_the_gap():
    rows = random_rows(4, seed=5, missing=0.0)
    for row in rows:
        row.streams["old_logprobs"] = row.logprobs.copy()
    _, metrics = run(Algorithm(policy_loss=PPOClip()), Leaf(rows).padded(range(4)))
    assert metrics["ratio_mean"] == 1.0
    assert metrics["logprob_gap"] > 0.0


# ---------------------------------------------------------------------------------- the 5-armed bandit

LOGITS = torch.tensor([0.3, -1.2, 0.9, 0.0, -0.4], dtype=torch.float64)
REFERENCE = torch.log_softmax(torch.tensor([-0.5, 0.4, 0.1, 1.1, -1.0], dtype=torch.float64), 0)
REWARDS = torch.tensor([1.0, 0.0, 0.3, -0.5, 2.0], dtype=torch.float64)


def expected_gradient(algorithm):
    """sum over arms of p(arm) x gradient of the loss of one sample of that arm, by the logits."""
    probabilities, total = LOGITS.softmax(0), torch.zeros(5, dtype=torch.float64)
    for arm in range(5):
        logits = LOGITS.clone().requires_grad_()
        logprobs = logits.log_softmax(0)
        batch = MicroBatch(
            tokens=torch.zeros(1, 1, dtype=torch.long),
            action_mask=torch.ones(1, 1, dtype=torch.bool),
            streams={
                "behaviour_logprobs": logprobs[arm].detach().reshape(1, 1),
                "ref_logprobs": REFERENCE[arm].reshape(1, 1),
                "advantages": REWARDS[arm].reshape(1, 1),
            },
        )
        entropy = -(logprobs.exp() * logprobs).sum().reshape(1, 1)
        run(algorithm, batch.with_logprobs(logprobs[arm].reshape(1, 1), entropy=entropy))[0].backward()
        total += probabilities[arm] * logits.grad
    return total


def true_gradient(objective):
    logits = LOGITS.clone().requires_grad_()
    objective(logits.log_softmax(0)).backward()
    return logits.grad


def reverse(logprobs):
    return (logprobs.exp() * (logprobs - REFERENCE)).sum()


def forward(logprobs):
    return (REFERENCE.exp() * (REFERENCE - logprobs)).sum()


KL_GRADIENTS = [(K1, {}, reverse), (K2, {}, reverse), (K3, {}, reverse), (K3, {"gradient": "forward"}, forward)]


@pytest.mark.parametrize(("brick", "options", "objective"), KL_GRADIENTS)
def test_case_31_every_kl_estimator_has_the_gradient_its_docstring_names(brick, options, objective):
    found = expected_gradient(Algorithm(policy_loss=Silent(), kl=brick(coefficient=1.0, **options)))
    assert torch.allclose(found, true_gradient(objective), atol=1e-12)
    other = forward if objective is reverse else reverse
    assert not torch.allclose(found, true_gradient(other), atol=1e-3)


@pytest.mark.parametrize("brick", [PPOClip(), PPOClip(dual_clip=3.0), Reinforce()], ids=str)
def test_on_policy_the_expected_gradient_of_a_policy_loss_is_the_policy_gradient(brick):
    found = expected_gradient(Algorithm(policy_loss=brick))
    assert torch.allclose(found, true_gradient(lambda logprobs: -(logprobs.exp() * REWARDS).sum()), atol=1e-12)


def test_the_entropy_bonus_climbs_the_entropy():
    found = expected_gradient(Algorithm(policy_loss=Silent(), entropy=Bonus(coefficient=1.0)))
    assert torch.allclose(found, true_gradient(lambda logprobs: (logprobs.exp() * logprobs).sum()), atol=1e-12)


# ---------------------------------------------------------------------------------- units and the divider


@dataclass(frozen=True)
class PerUnit:
    """One term of ones times the log-prob, in a unit."""

    per: object = "token"
    needs = frozenset()

    def __call__(self, batch, state, progress):
        return [Term("unit", batch.logprobs, batch.action_mask, per=self.per)]


def test_every_unit_is_counted_over_the_update():
    rows = [random_rows(1, seed=n, missing=0.0)[0] for n in range(4)]
    for number, row in enumerate(rows):
        row.action_mask[:] = number != 3
        row.rollout = [0, 0, 1, 2][number]
    leaf = Leaf(rows, torch.float64)
    total = sum(row.logprobs.sum() for row in rows[:3])
    tokens = sum(len(row) for row in rows[:3])
    for per, count in [("token", tokens), ("sequence", 3), ("rollout", 2), ("sum", 1), (Constant(5), 15)]:
        algorithm = Algorithm(policy_loss=PerUnit(per))
        loss, _ = run(algorithm, leaf.padded([0, 2]), leaf.padded([1, 3]))
        assert loss.item() == pytest.approx(total / count, rel=1e-12), per


def test_a_pair_is_one_comparison():
    @dataclass(frozen=True)
    class Prefer:
        needs = frozenset()

        def __call__(self, batch, state, progress):
            chosen, rejected = batch.halves(batch.segment_sum(batch.logprobs, batch.action_mask))
            return [Term("prefer", rejected - chosen, torch.ones_like(chosen, dtype=torch.bool), per="pair")]

    rows = random_rows(5, seed=9)
    for number, (pair, chosen) in enumerate([(1, False), (0, True), (-1, False), (1, True), (0, False)]):
        rows[number].pair, rows[number].chosen = pair, chosen
    sums = [float((row.logprobs * row.action_mask).sum()) for row in rows]
    loss, _ = run(Algorithm(policy_loss=Prefer()), Leaf(rows, torch.float64).padded(range(5)))
    assert loss.item() == pytest.approx((sums[4] - sums[1] + sums[0] - sums[3]) / 2)


def test_case_21_nothing_to_train_gives_zero_and_a_count_of_empty_terms():
    rows = random_rows(3, seed=4)
    for row in rows:
        row.action_mask[:] = False
    leaf = Leaf(rows)
    algorithm = Algorithm(policy_loss=PPOClip(), kl=K3(), entropy=Bonus())
    loss, metrics = run(algorithm, leaf.padded(range(3), fill=math.nan))
    loss.backward()
    assert loss.item() == 0.0
    assert metrics["empty_terms"] == 3
    assert (leaf.logprobs.grad == 0).all()
    assert "ratio_mean" not in metrics
    empty = Divider(algorithm, [], state=algorithm.state0(), progress=Progress())
    assert empty.metrics()["loss"] == 0.0
    for row in rows:
        row.action_mask[:], row.streams["advantages"][:] = True, 0.0
    loss, metrics = run(Algorithm(policy_loss=PPOClip()), Leaf(rows).padded(range(3)))
    assert loss.item() == 0.0
    assert metrics["empty_terms"] == 0


def test_a_metric_that_overflows_is_shown_as_it_is_and_leaves_the_loss_alone():
    streams = {"behaviour_logprobs": np.array([-95.0, -1.0]), "advantages": np.ones(2)}
    far = Row(np.ones(2, bool), streams, np.full(2, -1.0), np.full(2, 0.5))
    leaf = Leaf([far])
    loss, metrics = run(Algorithm(policy_loss=SPPO()), leaf.padded([0]))
    assert metrics["ratio_mean"] == math.inf
    assert metrics["loss"] == pytest.approx(loss.item())
    assert metrics["loss"] == pytest.approx(-math.log(1.3) / 2)


def test_a_mask_that_looks_at_the_new_logprobs_is_refused():
    @dataclass(frozen=True)
    class Gated:
        needs = frozenset()

        def __call__(self, batch, state, progress):
            return [Term("gated", batch.logprobs, batch.action_mask & (batch.logprobs > -1.0))]

    with pytest.raises(TrainingError, match=r"term 'gated'.*put a gate on the new log-probs into the value"):
        run(Algorithm(policy_loss=Gated()), Leaf(ROWS).padded(range(9)))


def test_two_terms_of_one_name_and_a_value_unlike_its_mask_are_refused():
    @dataclass(frozen=True)
    class Twice:
        needs = frozenset()

        def __call__(self, batch, state, progress):
            return [Term("kl", batch.logprobs, batch.action_mask)]

    @dataclass(frozen=True)
    class Crooked:
        needs = frozenset()

        def __call__(self, batch, state, progress):
            return [Term("crooked", batch.segment_sum(batch.logprobs, batch.action_mask), batch.action_mask)]

    with pytest.raises(TrainingError, match="two terms are called 'kl'"):
        run(Algorithm(policy_loss=Twice(), kl=K1()), Leaf(ROWS).padded(range(9)))
    with pytest.raises(TrainingError, match="one shape"):
        run(Algorithm(policy_loss=Crooked()), Leaf(ROWS).padded(range(9)))


def test_a_missing_stream_names_itself():
    batch = Leaf(ROWS).padded(range(9), left_out=["ref_logprobs"])
    with pytest.raises(TrainingError, match="no stream 'ref_logprobs'"):
        run(Algorithm(policy_loss=Silent(), kl=K1()), batch)


def test_the_state_of_a_brick_goes_in_and_comes_back():
    @dataclass(frozen=True)
    class Adaptive:
        needs = frozenset()

        def state0(self):
            return {"coefficient": 1.0}

        def __call__(self, batch, state, progress):
            return [Term("kl", batch.logprobs, batch.action_mask, weight=state["coefficient"])]

        def update(self, state, stats):
            return {"coefficient": state["coefficient"] * 2 if stats["kl"] < 0 else 0.0}

    algorithm = Algorithm(policy_loss=Silent(), kl=Adaptive())
    state = algorithm.state0()
    divider = Divider(algorithm, [Leaf(ROWS).padded(range(9))], state=state, progress=Progress())
    divider.loss(Leaf(ROWS).padded(range(9)))
    after = algorithm.update(state, divider.metrics())
    assert after == {"policy_loss": {}, "kl": {"coefficient": 2.0}, "entropy": {}}
