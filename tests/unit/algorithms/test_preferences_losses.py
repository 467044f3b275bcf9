"""Losses over pairs and labels against formulas and gradients written down again in float64 NumPy."""

import math

import numpy as np
import pytest
import torch

from triune.algorithms import Algorithm, Divider, Progress
from triune.algorithms.policy_losses.dpo import DPO
from triune.algorithms.policy_losses.ipo import IPO
from triune.algorithms.policy_losses.kto import KTO
from triune.algorithms.policy_losses.orpo import ORPO
from triune.algorithms.policy_losses.sft import SFT
from triune.algorithms.policy_losses.simpo import SimPO
from triune.testing.batches import Leaf, Row, add_pairs, random_rows


def paired_rows(num=9, seed=3):
    rows = random_rows(num, seed=seed)
    add_pairs(rows, seed=seed)
    return rows


ROWS = paired_rows()
PAIRS = {
    pair: {row.chosen: number for number, row in enumerate(ROWS) if row.pair == pair}
    for pair in sorted({row.pair for row in ROWS} - {-1})
}


def run(brick, rows, *layouts, state=None):
    """Loss, gradient of every row's tokens, and metrics of one update over micro-batches of these rows."""
    algorithm, leaf = Algorithm(policy_loss=brick), Leaf(rows, torch.float64)
    batches = [leaf.padded(numbers) for numbers in layouts or (range(len(rows)),)]
    started = {**algorithm.state0(), **({} if state is None else {"policy_loss": state})}
    divider = Divider(algorithm, batches, state=started, progress=Progress())
    loss = sum(divider.loss(batch) for batch in batches)
    loss.backward()
    starts = np.cumsum([0, *(len(row) for row in rows)])
    return loss.item(), np.split(leaf.logprobs.grad.numpy(), starts[1:-1]), divider.metrics()


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def sums(row, *, reference=True):
    """Sum of (new - reference) log-probs over trained tokens, and their number."""
    base = row.streams["ref_logprobs"] if reference else 0.0
    return float(((row.logprobs - base) * row.action_mask).sum()), int(row.action_mask.sum())


def dpo(brick, chosen, rejected, margin):
    d = brick.beta * (sums(chosen)[0] - sums(rejected)[0]) - margin
    e = brick.label_smoothing
    loss = -(1 - e) * math.log(sigmoid(d)) - e * math.log(sigmoid(-d))
    slope = brick.beta * (e * sigmoid(d) - (1 - e) * sigmoid(-d))
    return loss, slope, -slope


def ipo(brick, chosen, rejected, margin):
    (first, num_first), (second, num_second) = sums(chosen), sums(rejected)
    if brick.length == "sum":
        num_first = num_second = 1
    off = first / num_first - second / num_second - (0.5 + margin) / brick.beta
    return off**2, 2 * off / num_first, -2 * off / num_second


def simpo(brick, chosen, rejected, margin):
    (first, num_first), (second, num_second) = sums(chosen, reference=False), sums(rejected, reference=False)
    d = brick.beta * (first / num_first - second / num_second) - brick.gamma - margin
    slope = -brick.beta * sigmoid(-d)
    return -math.log(sigmoid(d)), slope / num_first, -slope / num_second


def orpo(brick, chosen, rejected, margin):
    (first, num_first), (second, num_second) = sums(chosen, reference=False), sums(rejected, reference=False)
    p, q = math.exp(first / num_first), math.exp(second / num_second)
    d = math.log(p / (1 - p)) - math.log(q / (1 - q)) - margin
    slope = -brick.coefficient * sigmoid(-d)
    loss = -math.log(p) - brick.coefficient * math.log(sigmoid(d))
    return loss, (-1 + slope / (1 - p)) / num_first, -slope / (1 - q) / num_second


CASES = [
    (DPO(), dpo),
    (DPO(beta=0.7, label_smoothing=0.2), dpo),
    (IPO(), ipo),
    (IPO(beta=0.4, length="mean"), ipo),
    (SimPO(), simpo),
    (SimPO(beta=5.0, gamma=0.3), simpo),
    (ORPO(), orpo),
    (ORPO(coefficient=1.5), orpo),
]


@pytest.mark.parametrize(("brick", "formula"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_every_loss_over_pairs_agrees_with_its_formula_and_its_gradient(brick, formula):
    loss, gradients, metrics = run(brick, ROWS)
    expected, slopes = 0.0, {}
    for halves in PAIRS.values():
        chosen, rejected = ROWS[halves[True]], ROWS[halves[False]]
        value, first, second = formula(brick, chosen, rejected, chosen.margin)
        expected += chosen.weight * value / len(PAIRS)
        slopes[halves[True]] = chosen.weight * first / len(PAIRS)
        slopes[halves[False]] = chosen.weight * second / len(PAIRS)
    assert len({row.weight for row in ROWS}) > 2
    assert len({row.margin for row in ROWS}) > 2
    assert loss == pytest.approx(expected, rel=1e-9)
    assert metrics["policy_loss"] == pytest.approx(loss, rel=1e-9)
    for number, row in enumerate(ROWS):
        np.testing.assert_allclose(gradients[number], slopes.get(number, 0.0) * row.action_mask, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("brick", [case[0] for case in CASES], ids=str)
def test_many_pairs_in_one_micro_batch_are_as_many_comparisons_as_in_many_micro_batches(brick):
    whole = run(brick, ROWS)
    single = [sorted(halves.values()) for halves in PAIRS.values()]
    apart = run(brick, ROWS, *single)
    assert len(single) > 2
    assert apart[0] == pytest.approx(whole[0], rel=1e-12)
    for one, other in zip(apart[1], whole[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-15)
    for name in ("policy_loss", "chosen_reward", "rejected_reward", "reward_margin", "pair_accuracy"):
        assert apart[2][name] == pytest.approx(whole[2][name], rel=1e-12)


def at_the_reference(weight=1.0, margin=0.0):
    """Two pairs of unequal lengths on an unmodified policy."""
    rows = []
    for number, length in enumerate([3, 5, 2, 6]):
        logprobs = -np.linspace(0.2, 1.0, length)
        streams = {"ref_logprobs": logprobs.copy(), "behaviour_logprobs": np.full(length, np.nan)}
        mask = np.arange(length) > 0
        row = Row(mask, streams, logprobs, np.ones(length), pair=number // 2, chosen=number % 2 == 0)
        row.weight, row.margin = weight, margin
        rows.append(row)
    return rows


def test_dpo_at_the_reference_costs_log_2_and_moves_every_token_by_a_quarter_of_beta():
    loss, gradients, metrics = run(DPO(beta=0.1), at_the_reference())
    assert loss == pytest.approx(math.log(2))
    # sigmoid(0) x beta, over two pairs
    for gradient, row, sign in zip(gradients, at_the_reference(), [-1, 1, -1, 1], strict=True):
        np.testing.assert_allclose(gradient, sign * 0.1 / 2 / 2 * row.action_mask)
    assert (metrics["chosen_reward"], metrics["rejected_reward"], metrics["reward_margin"]) == (0, 0, 0)
    assert metrics["pair_accuracy"] == 0.5


def test_the_weight_of_a_pair_scales_it_and_never_the_number_of_pairs():
    assert run(DPO(), at_the_reference(weight=3.0))[0] == pytest.approx(3 * math.log(2))
    rows = at_the_reference()
    rows[0].weight = rows[1].weight = 0.0
    assert run(DPO(), rows)[0] == pytest.approx(math.log(2) / 2)


def test_a_margin_asks_for_a_larger_gap():
    loss, gradients, metrics = run(DPO(beta=0.1), at_the_reference(margin=1.0))
    assert loss == pytest.approx(math.log(1 + math.e))
    assert gradients[0][1] == pytest.approx(-0.1 * sigmoid(1.0) / 2)
    assert metrics["reward_margin"] == 0, "what the policy does, not what is asked"


@pytest.mark.parametrize("brick", [DPO(), IPO(), SimPO(gamma=0.0), ORPO()], ids=str)
def test_swapping_the_halves_turns_the_margin_round(brick):
    swapped = paired_rows()
    for row in swapped:
        row.chosen = not row.chosen
    one, other = run(brick, ROWS)[2], run(brick, swapped)[2]
    assert other["reward_margin"] == pytest.approx(-one["reward_margin"])
    assert other["pair_accuracy"] == pytest.approx(1 - one["pair_accuracy"])
    assert other["chosen_reward"] == pytest.approx(one["rejected_reward"])


def test_swapping_the_halves_at_the_reference_turns_the_gradient_round():
    swapped = at_the_reference()
    for row in swapped:
        row.chosen = not row.chosen
    for one, other in zip(run(DPO(), at_the_reference())[1], run(DPO(), swapped)[1], strict=True):
        np.testing.assert_allclose(one, -other)


def test_ipo_is_at_rest_where_the_gap_is_one_over_two_beta():
    rows = at_the_reference()
    for row in rows:  # log-ratio of the chosen half minus that of the other: 5 = 1 / (2 x 0.1)
        row.streams["ref_logprobs"] = row.logprobs - (2.5 if row.chosen else -2.5) / row.action_mask.sum()
    loss, gradients, metrics = run(IPO(beta=0.1), rows)
    assert loss == pytest.approx(0, abs=1e-12)
    assert max(abs(gradient).max() for gradient in gradients) < 1e-9
    assert metrics["reward_margin"] == pytest.approx(0.5)


def test_label_smoothing_puts_the_rest_of_dpo_at_the_log_odds_of_a_right_label():
    rows = at_the_reference()
    gap = math.log(0.9 / 0.1) / 0.5
    for row in rows:
        row.streams["ref_logprobs"] = row.logprobs - (gap / 2 if row.chosen else -gap / 2) / row.action_mask.sum()
    _, gradients, _ = run(DPO(beta=0.5, label_smoothing=0.1), rows)
    assert max(abs(gradient).max() for gradient in gradients) < 1e-12


def test_an_answer_that_is_all_but_certain_leaves_orpo_finite():
    rows = at_the_reference()
    rows[0].logprobs = np.zeros(len(rows[0]))
    loss, gradients, _ = run(ORPO(), rows)
    assert math.isfinite(loss)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_a_pair_of_which_one_half_trains_nothing_is_no_comparison():
    rows = at_the_reference()
    rows[3].action_mask[:] = False
    loss, gradients, _ = run(DPO(), rows)
    assert loss == pytest.approx(math.log(2))
    assert abs(gradients[2]).max() == 0


# -------------------------------------------------------------------------------------------------- labels


@pytest.mark.parametrize("seen", [0.0, 2.0, -3.0])
def test_kto_agrees_with_its_formula_its_gradient_and_a_reference_point_that_is_never_negative(seen):
    brick = KTO(beta=0.3, desirable_weight=1.25, undesirable_weight=0.5)
    rows = random_rows(9, seed=3)
    for number, row in enumerate(rows):
        row.reward = [1.0, 0.0, math.nan][number % 3]
    counted = [row for row in rows if row.action_mask.any() and not math.isnan(row.reward)]
    loss, gradients, metrics = run(brick, rows, state={"mean_log_ratio": seen})
    expected, point, slopes = 0.0, 0.3 * max(seen, 0.0), {}
    for row in counted:
        reward = 0.3 * sums(row)[0]
        sign, weight = (1, 1.25) if row.reward else (-1, 0.5)
        share = sigmoid(sign * (reward - point))
        expected += weight * (1 - share) / len(counted)
        slopes[id(row)] = -sign * weight * share * (1 - share) * 0.3 / len(counted)
    assert loss == pytest.approx(expected, rel=1e-9)
    assert metrics["reference_point"] == pytest.approx(point)
    assert metrics["log_ratio"] == pytest.approx(np.mean([sums(row)[0] for row in counted]))
    for row, gradient in zip(rows, gradients, strict=True):
        np.testing.assert_allclose(gradient, slopes.get(id(row), 0.0) * row.action_mask, rtol=1e-7, atol=1e-12)


def test_the_reference_point_of_kto_follows_the_mean_log_ratio_of_past_updates():
    brick = KTO(memory=0.75)
    state = brick.state0()
    assert state == {"mean_log_ratio": 0.0}
    state = brick.update(state, {"log_ratio": 4.0})
    assert state == {"mean_log_ratio": 1.0}
    assert brick.update(state, {}) == state, "an update without a labelled answer says nothing"


# ----------------------------------------------------------------------------------------------- imitation


@pytest.mark.parametrize(
    ("weight", "factor"), [("one", lambda p: 1.0), ("probability", lambda p: p), ("phi", lambda p: p * (1 - p))]
)
def test_a_weight_of_imitation_scales_each_tokens_gradient_and_is_a_constant_for_it(weight, factor):
    loss, gradients, _ = run(SFT(weight=weight), ROWS)
    num = sum(int(row.action_mask.sum()) for row in ROWS)
    factors = [factor(np.exp(row.logprobs)) * row.action_mask for row in ROWS]
    assert loss == pytest.approx(-sum((f * row.logprobs).sum() for f, row in zip(factors, ROWS, strict=True)) / num)
    for gradient, expected in zip(gradients, factors, strict=True):
        np.testing.assert_allclose(gradient, -expected / num, rtol=1e-9)
