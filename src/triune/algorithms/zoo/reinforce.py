"""The plain policy gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triune.algorithms.advantages.reinforce import ReinforceAdvantage
from triune.algorithms.algorithm import Algorithm
from triune.algorithms.policy_losses.reinforce import Reinforce
from triune.registry import brick, brick_field


@brick("algorithm")
@dataclass(frozen=True, kw_only=True)
class REINFORCE(Algorithm):
    """Reward times log-prob, no group, no ratio, no clip. The baseline every other method is measured against.

    Use it with one update per step and `sync.max_staleness: 0`.

    Source: Williams 1992.
    """

    advantage: Any = brick_field("advantage", ReinforceAdvantage())
    policy_loss: Any = brick_field("policy_loss", Reinforce(average="sequence_sum"))
    group_size: int = 1
