"""Mean-only group advantages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from triune.algorithms.credit import credit
from triune.records import Group
from triune.registry import brick


@brick("advantage", "dr_grpo")
@dataclass(frozen=True, kw_only=True)
class DrGRPOAdvantage:
    """Credit each rollout with its reward minus the group's mean.

    The mean includes the rollout itself, which scales the gradient by (G - 1) / G; RLOO corrects that. Unlike GRPO
    nothing is divided by a deviation, so easy and hard tasks keep their natural weight. A flat group gets exactly 0.

    Source: Dr. GRPO, arXiv:2503.20783, section 3.
    """

    where: ClassVar[str] = "pipeline"
    least_group: ClassVar[int] = 2

    def __call__(self, group: Group) -> Group:
        """Subtract the mean."""
        rewards = group.rewards.tolist()
        mean = math.fsum(rewards) / max(len(rewards), 1)
        if len(set(rewards)) <= 1:
            mean = rewards[0] if rewards else 0.0
        return credit(group, [reward - mean for reward in rewards])
