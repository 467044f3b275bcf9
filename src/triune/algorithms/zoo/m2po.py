"""Second-moment trust policy optimisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triune.algorithms.advantages.grpo import GRPOAdvantage
from triune.algorithms.algorithm import Algorithm
from triune.algorithms.policy_losses.m2po import M2PO as M2POLoss
from triune.registry import brick, brick_field


@brick("algorithm", "m2po")
@dataclass(frozen=True, kw_only=True)
class M2PO(Algorithm):
    """GRPO for very stale samples: only outliers are masked, as many as keep the mean squared log-ratio small.

    For asynchronous runs with a large `sync.max_staleness`, where PPO's clip would drop too many of the tokens that
    matter.

    Source: arXiv:2510.01161.
    """

    advantage: Any = brick_field("advantage", GRPOAdvantage())
    policy_loss: Any = brick_field("policy_loss", M2POLoss())
