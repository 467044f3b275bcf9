"""The adaptive entropy bonus: what it weighs, and how its coefficient moves."""

import pytest
import torch

from triune.algorithms import Algorithm, Divider, Progress
from triune.algorithms.entropies.adaptive_target import AdaptiveTarget
from triune.testing.batches import Leaf, random_rows
from triune.testing.proofs import Silent

ROWS = random_rows(9, seed=3)
COUNTED = [(row.entropy * row.action_mask).sum() for row in ROWS]
NUM_TOKENS = sum(row.action_mask.sum() for row in ROWS)
MEAN = sum(COUNTED) / NUM_TOKENS


def update(brick, state):
    leaf, algorithm = Leaf(ROWS, torch.float64), Algorithm(policy_loss=Silent(), entropy=brick)
    batches = [leaf.padded([0, 1, 2]), leaf.padded(range(3, 9))]
    divider = Divider(algorithm, batches, state={"entropy": state}, progress=Progress())
    loss = sum(divider.loss(batch) for batch in batches)
    if loss.requires_grad:
        loss.backward()
    metrics = divider.metrics()
    return loss, leaf.entropy.grad, metrics, algorithm.update({"entropy": state}, metrics)["entropy"]


def test_below_the_target_the_bonus_climbs_the_entropy_and_its_coefficient_rises():
    brick = AdaptiveTarget(target=5.0, step=0.01)
    loss, gradient, metrics, after = update(brick, {"coefficient": 0.03, "is_below": True})
    assert loss.item() == pytest.approx(-0.03 * MEAN)
    assert metrics["entropy"] == pytest.approx(MEAN)
    assert metrics["entropy_coefficient"] == pytest.approx(0.03)
    assert gradient.sum().item() == pytest.approx(-0.03)
    assert after == {"coefficient": pytest.approx(0.04), "is_below": True}


def test_above_the_target_nothing_is_applied_and_the_coefficient_falls_to_zero():
    brick = AdaptiveTarget(target=0.1, step=0.01)
    loss, gradient, metrics, after = update(brick, {"coefficient": 0.015, "is_below": False})
    assert loss.item() == 0.0
    assert gradient is None
    assert metrics["entropy_coefficient"] == 0.0
    assert metrics["entropy"] == pytest.approx(MEAN)
    assert after == {"coefficient": pytest.approx(0.005), "is_below": False}
    assert update(brick, after)[3] == {"coefficient": 0.0, "is_below": False}


def test_the_coefficient_applied_is_that_of_the_last_updates_entropy():
    brick = AdaptiveTarget(target=0.2, step=0.005)
    state = brick.state0()
    applied = []
    for entropy in (0.3, 0.19, 0.18, 0.21, 0.1):
        applied.append(state["coefficient"] if state["is_below"] else 0.0)
        state = brick.update(state, {"entropy": entropy})
    assert applied == pytest.approx([0.0, 0.0, 0.005, 0.010, 0.0])
    assert state == {"coefficient": pytest.approx(0.010), "is_below": True}
    assert brick.update(state, {}) == state


def test_it_holds_an_entropy_that_falls_without_it():
    brick, entropy = AdaptiveTarget(target=0.2, step=0.005), 1.0
    state, found = brick.state0(), []
    for _ in range(600):
        applied = state["coefficient"] if state["is_below"] else 0.0
        entropy = max(entropy - 0.01 + applied, 0.0)
        state = brick.update(state, {"entropy": entropy})
        found.append(entropy)
    assert min(found) > 0.1
    assert max(found[100:]) < 0.4
