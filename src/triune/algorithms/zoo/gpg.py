"""Group policy gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triune.algorithms.advantages.dr_grpo import DrGRPOAdvantage
from triune.algorithms.algorithm import Algorithm
from triune.algorithms.policy_losses.gpg import GPG as GPGLoss
from triune.registry import brick, brick_field


@brick("algorithm")
@dataclass(frozen=True, kw_only=True)
class GPG(Algorithm):
    """The plain policy gradient of rewards minus the group's mean, over the tokens that have an advantage.

    The smallest group method: no clip, no reference, no deviation. Use it with one update per step and
    `sync.max_staleness: 0`.

    Source: arXiv:2504.02546.
    """

    advantage: Any = brick_field("advantage", DrGRPOAdvantage())
    policy_loss: Any = brick_field("policy_loss", GPGLoss())
