"""GRPO done right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triune.algorithms.advantages.dr_grpo import DrGRPOAdvantage
from triune.algorithms.algorithm import Algorithm
from triune.algorithms.policy_losses.ppo_clip import PPOClip
from triune.registry import brick, brick_field


@brick("algorithm")
@dataclass(frozen=True, kw_only=True)
class DrGRPO(Algorithm):
    """GRPO without its two length and difficulty biases: no division by the deviation, and a constant instead of the
    length.

    Source: arXiv:2503.20783.
    """

    advantage: Any = brick_field("advantage", DrGRPOAdvantage())
    policy_loss: Any = brick_field("policy_loss", PPOClip(average="constant", length=1024))
