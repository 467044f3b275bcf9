"""REINFORCE with the greedy answer's reward as baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triune.algorithms.advantages.remax import ReMaxAdvantage
from triune.algorithms.algorithm import Algorithm
from triune.algorithms.policy_losses.reinforce import Reinforce
from triune.registry import brick, brick_field


@brick("algorithm", "remax")
@dataclass(frozen=True, kw_only=True)
class ReMax(Algorithm):
    """The plain policy gradient of whole answers, each compared with what the policy's greedy answer to the same
    task earned. An unbiased baseline for one sampled rollout per task, where groups are too dear.

    The greedy answer's reward must be known: see the advantage. Use it with one update per step and
    `sync.max_staleness: 0`.

    Source: arXiv:2310.10505.
    """

    advantage: Any = brick_field("advantage", ReMaxAdvantage())
    policy_loss: Any = brick_field("policy_loss", Reinforce(average="sequence_sum"))
    group_size: int = 1
