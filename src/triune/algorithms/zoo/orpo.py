"""Odds-ratio preference optimisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triune.algorithms.algorithm import Algorithm
from triune.algorithms.policy_losses.orpo import ORPO as ORPOLoss
from triune.registry import brick, brick_field


@brick("algorithm")
@dataclass(frozen=True, kw_only=True)
class ORPO(Algorithm):
    """Fine-tuning and preference in one stage, from a base model: imitate the chosen answer, lower the other's odds.

    Rows as for `dpo`; no reference model. The learning rate is that of fine-tuning rather than of DPO.

    Source: arXiv:2403.07691.
    """

    policy_loss: Any = brick_field("policy_loss", ORPOLoss())
    group_size: int = 1
