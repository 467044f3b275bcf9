"""Soft adaptive policy optimisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triune.algorithms.advantages.grpo import GRPOAdvantage
from triune.algorithms.algorithm import Algorithm
from triune.algorithms.policy_losses.sapo import SAPO as SAPOLoss
from triune.registry import brick, brick_field


@brick("algorithm")
@dataclass(frozen=True, kw_only=True)
class SAPO(Algorithm):
    """GRPO with a smooth gate instead of the clip: a token's gradient fades as its ratio leaves 1, without a jump.

    For several updates per step where GRPO is unstable and GSPO throws whole answers away.

    Source: arXiv:2511.20347.
    """

    advantage: Any = brick_field("advantage", GRPOAdvantage())
    policy_loss: Any = brick_field("policy_loss", SAPOLoss())
