"""KL bricks: estimates and gradients against slow references, the place in the reward, the adaptive coefficient."""

import math

import numpy as np
import pytest
import torch

from triune import registry
from triune.algorithms import Algorithm, Divider, MicroBatch, Progress
from triune.algorithms.kls.abs import Abs
from triune.algorithms.kls.corrected_k3 import CorrectedK3
from triune.algorithms.kls.k1 import K1
from triune.algorithms.kls.k2 import K2
from triune.algorithms.kls.k3 import K3
from triune.algorithms.kls.low_variance import LowVariance
from triune.algorithms.zoo.grpo import GRPO
from triune.errors import ConfigError
from triune.testing.batches import Leaf, random_rows
from triune.testing.proofs import Silent

ROWS = random_rows(9, seed=3)
for row in ROWS:
    row.streams["old_logprobs"] = row.logprobs + 0.2

# Value of a token, and the derivative it is to have, of x = log p - log ref and y = log p - log behaviour.
K3_OF = lambda x: math.exp(-x) - 1 + x  # noqa: E731
SLOPES = [
    (K1(), lambda x, y: x, lambda x, y: x),
    (K2(), lambda x, y: x * x / 2, lambda x, y: x),
    (K3(), lambda x, y: K3_OF(x), lambda x, y: x),
    (K3(gradient="forward"), lambda x, y: K3_OF(x), lambda x, y: 1 - math.exp(-x)),
    (LowVariance(), lambda x, y: K3_OF(x), lambda x, y: 1 - math.exp(-x)),
    (LowVariance(gradient="reverse"), lambda x, y: K3_OF(x), lambda x, y: x),
    (
        LowVariance(most_log_ratio=0.3, most_value=0.03),
        lambda x, y: min(K3_OF(min(max(x, -0.3), 0.3)), 0.03),
        lambda x, y: 1 - math.exp(-x) if abs(x) < 0.3 and K3_OF(x) < 0.03 else 0.0,
    ),
    (Abs(), lambda x, y: abs(x), lambda x, y: math.copysign(1, x)),
    (CorrectedK3(), lambda x, y: math.exp(y) * K3_OF(x), lambda x, y: math.exp(y) * x),
]
ids = lambda value: str(value)[:60] if not callable(value) else ""  # noqa: E731


def distances(row):
    """x and y of every token."""
    behaviour = row.streams["behaviour_logprobs"]
    return row.logprobs - row.streams["ref_logprobs"], np.where(np.isnan(behaviour), 0, row.logprobs - behaviour)


def update(brick, rows=ROWS, state=None):
    leaf, algorithm = Leaf(rows, torch.float64), Algorithm(policy_loss=Silent(), kl=brick)
    batch = leaf.padded(range(len(rows)))
    divider = Divider(algorithm, [batch], state={"kl": state or brick.state0()}, progress=Progress())
    loss = divider.loss(batch)
    if loss.requires_grad:
        loss.backward()
    return loss.item(), leaf.logprobs.grad, divider.metrics()


@pytest.mark.parametrize(("brick", "value", "slope"), SLOPES, ids=ids)
def test_estimate_and_gradient_agree_with_a_slow_reference(brick, value, slope):
    values, slopes = [], []
    for row in ROWS:
        for t, (x, y) in enumerate(zip(*distances(row), strict=True)):
            slopes.append(slope(x, y) if row.action_mask[t] else 0.0)
            if row.action_mask[t]:
                values.append(value(x, y))
    loss, gradient, metrics = update(brick)
    assert metrics["kl"] == pytest.approx(np.mean(values))
    assert loss == pytest.approx(0.001 * np.mean(values))
    assert gradient.numpy() == pytest.approx(0.001 * np.array(slopes) / len(values))


FORMULAS = [case for case in SLOPES if getattr(case[0], "surrogate", None) is None]


@pytest.mark.parametrize(("brick", "value", "slope"), FORMULAS, ids=ids)
def test_where_no_surrogate_is_named_the_gradient_is_the_slope_of_the_value(brick, value, slope):
    for x, y in [(0.1, 0.4), (-0.2, -0.3), (0.7, 0.1), (-0.6, 0.5)]:
        found = (value(x + 1e-6, y + 1e-6) - value(x - 1e-6, y - 1e-6)) / 2e-6
        assert slope(x, y) == pytest.approx(found, abs=1e-6)


def test_corrected_k3_has_the_reverse_kl_and_its_gradient_on_samples_of_any_policy():
    logits = torch.tensor([0.3, -1.2, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.5, 0.4, 0.1], dtype=torch.float64).log_softmax(0)
    behaviour = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64).log_softmax(0)
    true = (logits.softmax(0) * (logits.log_softmax(0) - reference)).sum()
    (true_gradient,) = torch.autograd.grad(true, logits)
    batch = MicroBatch(
        tokens=torch.zeros(3, 1, dtype=torch.long),
        action_mask=torch.ones(3, 1, dtype=torch.bool),
        streams={"ref_logprobs": reference[:, None], "behaviour_logprobs": behaviour[:, None]},
    )
    for brick, is_exact in [(CorrectedK3(), True), (K3(gradient="forward"), False), (K2(), False)]:
        value = brick.estimate(logits.log_softmax(0)[:, None], batch)
        expected = (behaviour.exp()[:, None] * value).sum()
        (gradient,) = torch.autograd.grad(expected, logits)
        assert torch.allclose(gradient, true_gradient, atol=1e-12) is is_exact
        assert torch.allclose(expected, true, atol=1e-12) is is_exact


def test_low_variance_is_finite_where_the_policy_gave_a_token_up():
    row = random_rows(1, seed=1, missing=0.0)[0]
    row.action_mask[:] = True
    row.logprobs = row.streams["ref_logprobs"] - 200.0
    _, gradient, metrics = update(LowVariance(), [row])
    assert metrics["kl"] == 10.0
    assert (gradient == 0).all()


# ------------------------------------------------------------------------------------------- in the reward


@pytest.mark.parametrize(("brick", "value", "slope"), SLOPES, ids=ids)
def test_in_the_reward_the_penalty_is_that_of_the_policy_that_began_the_step(brick, value, slope):
    fields = {**registry.fields_of(brick), "place": "reward", "coefficient": 0.5}
    brick = type(brick)(**fields)
    leaf = Leaf(ROWS, torch.float64)
    made = leaf.padded(range(9), width=20, fill=math.nan)
    prepared = MicroBatch(tokens=made.tokens, action_mask=made.action_mask, streams=made.streams)
    found = brick.token_penalty(prepared, brick.state0())
    assert not found.requires_grad
    for number, row in enumerate(ROWS):
        for t, (x, y) in enumerate(zip(*distances(row), strict=True)):
            is_known = not np.isnan(row.streams["behaviour_logprobs"][t])
            expected = 0.5 * value(x + 0.2, y + 0.2 if is_known else 0.0) if row.action_mask[t] else 0.0
            assert found[number, t].item() == pytest.approx(expected)
        assert (found[number, len(row) :] == 0).all()
    loss, _, metrics = update(brick)
    assert loss == 0.0
    assert metrics["kl"] == pytest.approx(np.mean([value(*xy) for row in ROWS for xy in of_actions(row)]))
    assert brick.needs == {"ref_logprobs", "old_logprobs"}
    assert brick.expected_gradient == "nothing"


def of_actions(row):
    x, y = distances(row)
    return zip(x[row.action_mask], y[row.action_mask], strict=True)


def test_a_penalty_in_the_reward_is_refused_for_an_advantage_that_takes_no_rewards_of_tokens():
    fields = {"use": "grpo", "kl": {"use": "k1", "place": "reward"}}
    with pytest.raises(ConfigError, match=r"algorithm.kl.place: found 'reward', but grpo takes no .* `place: loss`"):
        registry.build("algorithm", fields, "algorithm").check()
    registry.build("algorithm", {**fields, "advantage": "reinforce_pp"}, "algorithm").check()


REFUSED = [
    (K1(place="reward", on_flat_groups=False), "algorithm.kl.on_flat_groups: found false with `place: reward`"),
    (K1(target=0.1, coefficient=0.0), "algorithm.kl.coefficient: found 0 with a `target`"),
]


@pytest.mark.parametrize(("brick", "message"), REFUSED, ids=ids)
def test_fields_that_exclude_each_other_are_refused(brick, message):
    with pytest.raises(ConfigError, match=message):
        brick.check("algorithm.kl")


def test_a_penalty_in_the_reward_needs_the_policy_that_began_the_step():
    algorithm = registry.build(
        "algorithm", {"use": "grpo", "advantage": "reinforce_pp", "kl": {"use": "k1", "place": "reward"}}, "algorithm"
    )
    assert algorithm.recomputes_old(num_updates=1, max_staleness=0)
    never = type(algorithm)(**{**registry.fields_of(algorithm), "old_logprobs": "never"})
    with pytest.raises(ConfigError, match="found 'never', but kl k1 needs them"):
        never.check()


# ------------------------------------------------------------------------------------------- adaptive coefficient


def test_the_coefficient_follows_the_published_controller():
    brick = K3(coefficient=0.2, target=0.05, horizon=10)
    state = brick.state0()
    assert state == {"coefficient": 0.2}
    # errors: +100 % clipped to 0.2; -60 % to -0.2; +10 % as it is
    expected = 0.2
    for kl, factor in [(0.10, 1.02), (0.02, 0.98), (0.055, 1.01), (0.05, 1.0), (-0.1, 0.98)]:
        state, expected = brick.update(state, {"kl": kl}), expected * factor
        assert state["coefficient"] == pytest.approx(expected)
    assert brick.update(state, {}) == state
    assert K3().state0() == K3().update({}, {"kl": 9.0}) == {}


def test_the_coefficient_of_the_state_weighs_the_term_and_the_penalty():
    brick, state = K2(coefficient=0.5, target=0.1), {"coefficient": 0.25}
    loss, _, metrics = update(brick, state=state)
    assert loss == pytest.approx(0.25 * metrics["kl"])
    assert metrics["kl_coefficient"] == 0.25
    assert "kl_coefficient" not in update(K2())[2]
    batch = Leaf(ROWS, torch.float64).padded(range(9))
    penalties = [K2(place="reward", target=0.1).token_penalty(batch, {"coefficient": c}) for c in (0.25, 0.5)]
    assert torch.allclose(penalties[0] * 2, penalties[1])


def test_the_controller_holds_a_kl_that_answers_to_its_coefficient():
    brick = K2(coefficient=0.001, target=0.05)
    state = brick.state0()
    for _ in range(1000):
        state = brick.update(state, {"kl": 0.001 / state["coefficient"]})
    assert state["coefficient"] == pytest.approx(0.02, rel=1e-3)


def test_the_state_is_part_of_the_algorithms_and_follows_its_metrics():
    algorithm = GRPO(kl=K2(coefficient=0.1, target=1e-6))
    batch = Leaf(ROWS).padded(range(9))
    divider = Divider(algorithm, [batch], state=algorithm.state0(), progress=Progress())
    divider.loss(batch)
    after = algorithm.update(algorithm.state0(), divider.metrics())
    assert after["kl"] == {"coefficient": pytest.approx(0.102)}
