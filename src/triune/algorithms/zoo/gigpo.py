"""Group-in-group policy optimisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triune.algorithms.advantages.gigpo import GiGPOAdvantage
from triune.algorithms.algorithm import Algorithm
from triune.algorithms.policy_losses.ppo_clip import PPOClip
from triune.registry import brick, brick_field


@brick("algorithm", "gigpo")
@dataclass(frozen=True, kw_only=True)
class GiGPO(Algorithm):
    """For agents that come to the same states again: rollouts of a task are compared as in GRPO, and inside them
    the steps that were taken in one state, by what followed. Fine credit without a critic and without further
    rollouts.

    The environment names its states (`Step.state_key`, or `model.note_turn(state_key=…)`); without names it is
    GRPO. The paper adds k3 in the loss (`kl: {use: k3, coefficient: 0.01}`).

    Source: arXiv:2505.10978.
    """

    advantage: Any = brick_field("advantage", GiGPOAdvantage())
    policy_loss: Any = brick_field("policy_loss", PPOClip())
