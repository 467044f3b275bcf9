"""Direct preference optimisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triune.algorithms.algorithm import Algorithm
from triune.algorithms.policy_losses.dpo import DPO as DPOLoss
from triune.registry import brick, brick_field


@brick("algorithm")
@dataclass(frozen=True, kw_only=True)
class DPO(Algorithm):
    """Learn from pairs of answers in a file, one preferred: no rewards, no sampling, no critic.

    Rows hold `prompt`, `chosen` and `rejected` (text or chat messages), and may hold `weight` and `margin`. The
    reference is the model the run begins with; use a small learning rate, 5e-7 for a model of billions.

    Source: arXiv:2305.18290.
    """

    policy_loss: Any = brick_field("policy_loss", DPOLoss())
    group_size: int = 1
