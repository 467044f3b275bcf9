"""Asymmetric REINFORCE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triune.algorithms.advantages.asymre import AsymREAdvantage
from triune.algorithms.algorithm import Algorithm
from triune.algorithms.policy_losses.reinforce import Reinforce
from triune.registry import brick, brick_field


@brick("algorithm", "asymre")
@dataclass(frozen=True, kw_only=True)
class AsymRE(Algorithm):
    """REINFORCE on whole answers with a baseline a little below the group's mean, so that off-policy it imitates
    what was good more than it unlearns what was bad. For stale samples, without importance weights and clip.

    Flat groups teach here: leave `drop_flat_groups` out of the pipeline.

    Source: arXiv:2506.20520.
    """

    advantage: Any = brick_field("advantage", AsymREAdvantage())
    policy_loss: Any = brick_field("policy_loss", Reinforce(average="sequence_sum"))
