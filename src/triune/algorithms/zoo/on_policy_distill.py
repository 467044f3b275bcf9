"""Learn from a teacher on one's own answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triune.algorithms.advantages.on_policy_distill import OnPolicyDistill
from triune.algorithms.algorithm import Algorithm
from triune.algorithms.policy_losses.ppo_clip import PPOClip
from triune.registry import brick, brick_field


@brick("algorithm", "on_policy_distill")
@dataclass(frozen=True, kw_only=True)
class OnPolicyDistillation(Algorithm):
    """The policy answers, and a teacher says of every token how much likelier it finds it: reverse KL to the
    teacher as a dense reward. Learns a specialist's skill in a fraction of the steps that a reward per answer
    takes, and needs no reward at all; `advantage: {task_weight: 1.0}` adds the task's.

    Needs a teacher (section `teacher`), or experience that stores its log-probs.

    Source: arXiv:2306.13649; arXiv:2602.12125 for `advantage: {extrapolation: 1.25}`.
    """

    advantage: Any = brick_field("advantage", OnPolicyDistill())
    policy_loss: Any = brick_field("policy_loss", PPOClip())
    group_size: int = 4
