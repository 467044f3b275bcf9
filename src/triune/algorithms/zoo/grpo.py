"""Group relative policy optimisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triune.algorithms.advantages.grpo import GRPOAdvantage
from triune.algorithms.algorithm import Algorithm
from triune.algorithms.policy_losses.ppo_clip import PPOClip
from triune.registry import brick, brick_field


@brick("algorithm")
@dataclass(frozen=True, kw_only=True)
class GRPO(Algorithm):
    """Several rollouts per task; those better than their group are reinforced, through PPO's clip. No critic.

    Defaults are those in use today: token mean over the batch and no KL term. The paper averages per sequence
    (`policy_loss: {average: sequence}`) and adds k3 (`kl: {use: k3, coefficient: 0.04, gradient: forward}`).

    Source: arXiv:2402.03300.
    """

    advantage: Any = brick_field("advantage", GRPOAdvantage())
    policy_loss: Any = brick_field("policy_loss", PPOClip())
