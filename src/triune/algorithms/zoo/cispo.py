"""Clipped importance weights, unclipped gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triune.algorithms.advantages.grpo import GRPOAdvantage
from triune.algorithms.algorithm import Algorithm
from triune.algorithms.policy_losses.cispo import CISPO as CISPOLoss
from triune.registry import brick, brick_field


@brick("algorithm")
@dataclass(frozen=True, kw_only=True)
class CISPO(Algorithm):
    """GRPO whose tokens keep their gradient however far the ratio moved; only their weight is bounded.

    For several updates per step or stale samples, where PPO's clip would drop the rare tokens that turn an argument
    round. With one update per step on fresh samples it is GRPO.

    Source: arXiv:2506.13585.
    """

    advantage: Any = brick_field("advantage", GRPOAdvantage())
    policy_loss: Any = brick_field("policy_loss", CISPOLoss())
