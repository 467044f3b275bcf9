"""Maximum-likelihood reinforcement learning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triune.algorithms.advantages.max_rl import MaxRLAdvantage
from triune.algorithms.algorithm import Algorithm
from triune.algorithms.policy_losses.ppo_clip import PPOClip
from triune.registry import brick, brick_field


@brick("algorithm")
@dataclass(frozen=True, kw_only=True)
class MaxRL(Algorithm):
    """Climb the log of the success rate instead of the rate: a task solved once in a hundred weighs a hundred
    times as much per success. For pass or fail rewards on hard tasks, and where several tries count (pass@k).
    Larger groups come nearer to the likelihood.

    Rewards must be 0 or more. Whole answers are summed, as the estimator wants it; the clip matters off-policy
    only.

    Source: arXiv:2602.02710.
    """

    advantage: Any = brick_field("advantage", MaxRLAdvantage())
    policy_loss: Any = brick_field("policy_loss", PPOClip(average="sequence_sum"))
