"""Simple preference optimisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triune.algorithms.algorithm import Algorithm
from triune.algorithms.policy_losses.simpo import SimPO as SimPOLoss
from triune.registry import brick, brick_field


@brick("algorithm", "simpo")
@dataclass(frozen=True, kw_only=True)
class SimPO(Algorithm):
    """Preferences by likelihood per token, with a margin and without a reference model: half of DPO's memory.

    Rows as for `dpo`. The policy is held by nothing but a small learning rate and few steps.

    Source: arXiv:2405.14734.
    """

    policy_loss: Any = brick_field("policy_loss", SimPOLoss())
    group_size: int = 1
