"""Softmax PPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triune.algorithms.advantages.dr_grpo import DrGRPOAdvantage
from triune.algorithms.algorithm import Algorithm
from triune.algorithms.policy_losses.sppo import SPPO as SPPOLoss
from triune.registry import brick, brick_field


@brick("algorithm")
@dataclass(frozen=True, kw_only=True)
class SPPO(Algorithm):
    """Rewards minus the group's mean through a clipped *log*-ratio: REINFORCE inside the clip, nothing outside.

    For several updates per step where PPO's weight by the ratio is not wanted.

    Source: arXiv:2108.05828.
    """

    advantage: Any = brick_field("advantage", DrGRPOAdvantage())
    policy_loss: Any = brick_field("policy_loss", SPPOLoss())
