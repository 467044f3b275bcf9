"""GRPO for agents of several steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triune.algorithms.advantages.multi_step_grpo import MultiStepGRPOAdvantage
from triune.algorithms.algorithm import Algorithm
from triune.algorithms.policy_losses.ppo_clip import PPOClip
from triune.registry import brick, brick_field


@brick("algorithm")
@dataclass(frozen=True, kw_only=True)
class MultiStepGRPO(Algorithm):
    """The rollouts of a task are compared once, and every step of a rollout gets the result, also where each step
    is stored as a sequence of its own (`explorer.merge_turns: false`). Where the environment rewards single turns,
    `advantage: {rewards: turns}` credits each with what follows it.

    Source: arXiv:2402.03300.
    """

    advantage: Any = brick_field("advantage", MultiStepGRPOAdvantage())
    policy_loss: Any = brick_field("policy_loss", PPOClip())
