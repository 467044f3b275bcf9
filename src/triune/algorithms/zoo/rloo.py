"""REINFORCE leave one out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triune.algorithms.advantages.rloo import RLOOAdvantage
from triune.algorithms.algorithm import Algorithm
from triune.algorithms.policy_losses.reinforce import Reinforce
from triune.registry import brick, brick_field


@brick("algorithm")
@dataclass(frozen=True, kw_only=True)
class RLOO(Algorithm):
    """Several rollouts per task, each compared with the mean of the others; the plain policy gradient of whole
    answers, without critic, ratio and clip. The unbiased baseline for fresh samples.

    Use it with one update per step and `sync.max_staleness: 0`; `policy_loss: ppo_clip` corrects stale samples.

    Source: arXiv:2402.14740.
    """

    advantage: Any = brick_field("advantage", RLOOAdvantage())
    policy_loss: Any = brick_field("policy_loss", Reinforce(average="sequence_sum"))
    group_size: int = 4
