"""Supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triune.algorithms.advantages.none import NoAdvantage
from triune.algorithms.algorithm import Algorithm
from triune.algorithms.policy_losses.sft import SFT as SFTLoss
from triune.registry import brick, brick_field


@brick("algorithm")
@dataclass(frozen=True, kw_only=True)
class SFT(Algorithm):
    """Imitate stored answers; needs neither rewards nor an explorer.

    Source: the first stage of InstructGPT, arXiv:2203.02155.
    """

    advantage: Any = brick_field("advantage", NoAdvantage())
    policy_loss: Any = brick_field("policy_loss", SFTLoss())
    group_size: int = 1
