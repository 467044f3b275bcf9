"""Group-relative REINFORCE with clipping as its only safeguard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triune.algorithms.advantages.rec import RECAdvantage
from triune.algorithms.algorithm import Algorithm
from triune.algorithms.policy_losses.rec import REC as RECLoss
from triune.registry import brick, brick_field


@brick("algorithm")
@dataclass(frozen=True, kw_only=True)
class REC(Algorithm):
    """Rewards minus the group's mean, no deviation, and tokens whose ratio left the range are passed over; no
    importance weight. For asynchronous and off-policy runs, and for asking what in GRPO matters.

    The family: `policy_loss: {clip: one_side | two_side | ring, importance: true}`, `advantage: {drop: balance}`.

    Source: arXiv:2509.24203.
    """

    advantage: Any = brick_field("advantage", RECAdvantage())
    policy_loss: Any = brick_field("policy_loss", RECLoss())
