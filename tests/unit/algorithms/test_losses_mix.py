"""MIX and CHORD against references written down again in NumPy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from triune import registry
from triune.algorithms import Divider, Progress
from triune.algorithms.policy_losses.chord import Chord
from triune.algorithms.policy_losses.mix import MixLoss
from triune.algorithms.policy_losses.ppo_clip import PPOClip
from triune.algorithms.zoo.chord import CHORD
from triune.algorithms.zoo.mix import Mix
from triune.config.plugins import load_plugins
from triune.errors import ConfigError
from triune.records import Source
from triune.testing.batches import Leaf, Row, random_rows


def rows_of_both(seed: int = 3) -> list[Any]:
    """Sampled sequences with advantages, and expert ones whose behaviour nobody knows."""
    rows = random_rows(9, seed=seed)
    for row in rows:
        if row.source is Source.EXPERT:
            row.streams["behaviour_logprobs"][:] = np.nan
            row.streams["advantages"][:] = 0.0
    return rows


def parts(rows: list[Any], *, phi: bool) -> tuple[float, float, np.ndarray, np.ndarray]:
    """Value and gradient of the clipped surrogate over sampled tokens, and of imitation over the expert's."""
    rl, sft, grad_rl, grad_sft = [], [], [], []
    for row in rows:
        for t in range(len(row)):
            grad_rl.append(0.0)
            grad_sft.append(0.0)
            if not row.action_mask[t]:
                continue
            new = row.logprobs[t]
            if row.source is Source.EXPERT:
                p = math.exp(new)
                weight = p * (1 - p) if phi else 1.0
                sft.append(-weight * new)
                grad_sft[-1] = -weight
                continue
            behaviour, a = row.streams["behaviour_logprobs"][t], row.streams["advantages"][t]
            if math.isnan(behaviour):
                continue
            ratio = math.exp(new - behaviour)
            clipped = min(max(ratio, 0.8), 1.2)
            rl.append(-min(ratio * a, clipped * a))
            grad_rl[-1] = -ratio * a if ratio * a <= clipped * a else 0.0
    return np.mean(rl), np.mean(sft), np.array(grad_rl) / len(rl), np.array(grad_sft) / len(sft)


def trained(algorithm: Any, rows: list[Any], progress: Progress, *shares: Any) -> tuple[np.ndarray, dict[str, float]]:
    leaf = Leaf(rows, dtype=torch.float64)
    batches = [leaf.padded(share) for share in shares or [range(len(rows))]]
    divider = Divider(algorithm, batches, state=algorithm.state0(), progress=progress)
    for batch in batches:
        divider.loss(batch).backward()
    assert leaf.logprobs.grad is not None
    return leaf.logprobs.grad.numpy(), divider.metrics()


@pytest.mark.parametrize("mu", [0.0, 0.1, 0.6, 1.0])
@pytest.mark.parametrize("shares", [(), ([0, 1, 2], [3], [4, 5, 6, 7, 8])])
def test_mix_is_the_weighted_sum_of_both_parts_each_averaged_over_its_own_tokens(mu: float, shares: Any):
    rows = rows_of_both()
    rl, sft, grad_rl, grad_sft = parts(rows, phi=False)
    grad, metrics = trained(Mix(policy_loss=MixLoss(mu=mu)), rows, Progress(), *shares)
    np.testing.assert_allclose(grad, (1 - mu) * grad_rl + mu * grad_sft, atol=1e-12)
    assert metrics["policy_loss"] == pytest.approx(rl, abs=1e-12)
    assert metrics["sft_loss"] == pytest.approx(sft, abs=1e-12)
    assert metrics["loss"] == pytest.approx((1 - mu) * rl + mu * sft, abs=1e-12)


@pytest.mark.parametrize("step", [0, 3, 10, 500])
def test_chord_weighs_expert_tokens_by_p_times_one_minus_p_as_a_constant_and_the_whole_by_mu(step: int):
    rows = rows_of_both(5)
    rl, sft, grad_rl, grad_sft = parts(rows, phi=True)
    loss = Chord(peak=0.8, valley=0.2, warmup_steps=6, decay_steps=10)
    mu = loss.mu_at(Progress(step, 1000))
    grad, metrics = trained(CHORD(policy_loss=loss), rows, Progress(step, 1000))
    np.testing.assert_allclose(grad, (1 - mu) * grad_rl + mu * grad_sft, atol=1e-12)
    assert metrics["mu"] == pytest.approx(mu)
    assert metrics["loss"] == pytest.approx((1 - mu) * rl + mu * sft, abs=1e-12)


def test_mu_rises_in_a_line_falls_along_half_a_cosine_and_stays():
    loss = Chord(peak=0.9, valley=0.1, warmup_steps=3, decay_steps=4)
    found = [round(loss.mu_at(Progress(step, 100)), 6) for step in range(10)]
    fall = [0.9, 0.1 + 0.8 * (2 + math.sqrt(2)) / 4, 0.5, 0.1 + 0.8 * (2 - math.sqrt(2)) / 4]
    assert found == [round(mu, 6) for mu in (0.0, 0.3, 0.6, *fall, 0.1, 0.1, 0.1)]
    assert Chord(peak=0.3, valley=0.3, decay_steps=0).mu_at(Progress(0, 1)) == 0.3


def test_a_step_without_expert_answers_or_without_sampled_ones_trains_on_the_other_part():
    for source, lacking in ((Source.POLICY, "sft_loss"), (Source.EXPERT, "policy_loss")):
        rows = [row for row in rows_of_both() if row.source is source]
        grad, metrics = trained(Mix(), rows, Progress())
        assert metrics[lacking] == 0
        assert metrics["empty_terms"] == 1
        assert np.abs(grad).sum() > 0


def test_the_parts_are_losses_of_their_own_that_a_run_file_changes_or_replaces():
    spec = {"use": "mix", "policy_loss": {"mu": 0.3, "rl": {"clip_high": 0.28}, "imitation": {"average": "sequence"}}}
    loss = registry.build("algorithm", spec, "algorithm").policy_loss
    assert (loss.mu, loss.rl.clip_high, loss.rl.clip_low, loss.imitation.average) == (0.3, 0.28, 0.2, "sequence")
    assert loss.imitation.sources == (Source.EXPERT,)
    other = registry.build("policy_loss", {"use": "chord", "rl": "gspo"}, "x")
    assert type(other.rl).__name__ == "GSPO"
    with pytest.raises(ConfigError, match=r"algorithm.policy_loss.rl.length"):
        Mix(policy_loss=MixLoss(rl=PPOClip(average="constant"))).check()


def sampled_and_given(advantage: float = 1.0) -> list[Row]:
    """Ten sampled tokens, and thirty that an expert wrote far from the reference."""

    def row(num: int, number: int, behaviour: float, credit: float, ref: float, source: Source) -> Row:
        streams = {"behaviour_logprobs": behaviour, "advantages": credit, "ref_logprobs": ref}
        made = {name: np.full(num, value) for name, value in streams.items()}
        return Row(np.ones(num, bool), made, np.full(num, -1.0), np.full(num, 0.5), number, source=source)

    return [row(10, 0, -1.0, advantage, -1.5, Source.POLICY), row(30, 1, math.nan, 0.0, -6.0, Source.EXPERT)]


def mixed(use: str = "mix", **loss: Any) -> Any:
    return registry.build("algorithm", {"use": use, "policy_loss": loss}, "algorithm")


RL = {"ppo_clip": -0.1, "reinforce": -0.1, "opmd": -1.0}


@pytest.mark.parametrize("rl", [*RL, {"use": "gpg", "count_flat": True}])
def test_any_loss_on_sampled_tokens_is_averaged_over_those_alone(rl: Any):
    grad, _ = trained(mixed(mu=0.0, rl=rl), sampled_and_given(), Progress())
    expected = RL[rl] if isinstance(rl, str) else -0.1  # opmd: the sum over the one sampled sequence
    np.testing.assert_allclose(grad, [expected] * 10 + [0.0] * 30, atol=1e-12)


@pytest.mark.parametrize("imitation", ["sft", {"use": "sft", "weight": "phi"}, {"sources": []}, {}])
def test_whatever_imitates_never_imitates_what_the_policy_sampled(imitation: Any):
    grad, _ = trained(mixed(mu=0.5, imitation=imitation), sampled_and_given(-1.0), Progress())
    np.testing.assert_allclose(grad[:10], 0.5 * 0.1, atol=1e-12)
    assert (grad[10:] < 0).all()


def test_other_sources_may_be_imitated_and_are_then_in_no_other_part():
    rows = sampled_and_given()
    rows[1].source = Source.TEACHER
    loss = {"mu": 0.5, "rl": "reinforce", "imitation": {"sources": ["expert", "teacher"]}}
    grad, _ = trained(mixed(**loss), rows, Progress())
    np.testing.assert_allclose(grad, [-0.05] * 10 + [-0.5 / 30] * 30, atol=1e-12)


@pytest.mark.parametrize(
    ("imitation", "message"),
    [
        ("dpo", r"imitation: found dpo, which compares pairs.*write `imitation: \{use: sft\}`"),
        ("kto", r"imitation: found kto, which keeps a state"),
        ("reinforce", r"imitation: found reinforce, which follows advantages"),
        ({"sources": ["expert", "policy"]}, r"imitation.sources: found \[expert, policy\].*write `\[expert\]`"),
    ],
)
@pytest.mark.parametrize("use", ["mix", "chord"])
def test_what_would_imitate_nobody_or_the_policy_itself_is_refused(use: str, imitation: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        mixed(use, imitation=imitation).check()


def test_the_divergence_beside_an_imitation_is_that_of_what_was_sampled():
    kl = {"use": "k1", "coefficient": 1.0}
    algorithm = registry.build("algorithm", {"use": "mix", "policy_loss": {"mu": 0.3}, "kl": kl}, "algorithm")
    grad, metrics = trained(algorithm, sampled_and_given(0.0), Progress())
    assert metrics["kl"] == pytest.approx(0.5)  # 3.875 with the expert's tokens, whose log-ratio is 5
    np.testing.assert_allclose(grad[10:], -0.3 / 30, atol=1e-12)


def test_the_example_of_a_user_s_file_computes_what_the_built_in_does_with_any_loss(monkeypatch: Any):
    monkeypatch.setattr(registry, "_marked", dict(registry._marked))
    load_plugins(["mix.py"], Path(__file__).parents[3] / "examples" / "mix")
    rows, parts_of_mine = rows_of_both(), {"mu": 0.4, "grpo": "opmd", "sft": {"average": "sequence"}}
    mine = registry.build("algorithm", {"use": "my_mix", "policy_loss": parts_of_mine}, "algorithm")
    theirs = mixed(mu=0.4, rl="opmd", imitation={"average": "sequence"})
    (grad, metrics), (expected, shown) = (trained(one, rows, Progress()) for one in (mine, theirs))
    np.testing.assert_array_equal(grad, expected)
    assert metrics == shown
