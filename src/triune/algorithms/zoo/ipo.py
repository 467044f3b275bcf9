"""Identity preference optimisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triune.algorithms.algorithm import Algorithm
from triune.algorithms.policy_losses.ipo import IPO as IPOLoss
from triune.registry import brick, brick_field


@brick("algorithm")
@dataclass(frozen=True, kw_only=True)
class IPO(Algorithm):
    """DPO with a target instead of a race: the gap between two answers is brought to a fixed size.

    Use it where every pair was compared once and labels are trusted: DPO would drive such pairs apart without bound.
    Rows as for `dpo`.

    Source: arXiv:2310.12036.
    """

    policy_loss: Any = brick_field("policy_loss", IPOLoss())
    group_size: int = 1
