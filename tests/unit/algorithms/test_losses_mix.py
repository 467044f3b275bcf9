"""MIX and CHORD against references written down again in NumPy."""

from __future__ import annotations

import math
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
from triune.errors import ConfigError
from triune.records import Source
from triune.testing.batches import Leaf, random_rows


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
