"""Tapered off-policy REINFORCE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triune.algorithms.advantages.dr_grpo import DrGRPOAdvantage
from triune.algorithms.algorithm import Algorithm
from triune.algorithms.policy_losses.topr import TOPR as TOPRLoss
from triune.registry import brick, brick_field


@brick("algorithm")
@dataclass(frozen=True, kw_only=True)
class TOPR(Algorithm):
    """Imitate what was better than the group's mean, unlearn the rest only as long as the policy still does it.

    For stale, replayed or foreign samples, without KL term and clip. The baseline decides how much counts as good: the
    paper's reward of 1 or -1 without one is `advantage: {use: reinforce, baseline: 0.5}` for rewards of 0 and 1.

    Source: arXiv:2503.14286.
    """

    advantage: Any = brick_field("advantage", DrGRPOAdvantage())
    policy_loss: Any = brick_field("policy_loss", TOPRLoss())
