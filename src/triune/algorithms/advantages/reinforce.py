"""The reward itself as advantage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from triune.algorithms.credit import credit
from triune.records import Group
from triune.registry import brick


@brick("advantage", "reinforce")
@dataclass(frozen=True, kw_only=True)
class ReinforceAdvantage:
    """Credit each rollout with its reward minus a constant.

    Works for groups of one. Any constant leaves the expected gradient unchanged; one near the mean reward lowers its
    variance.

    Source: Williams 1992, "Simple statistical gradient-following algorithms".

    Attributes:
        baseline: Subtracted from every reward, in its unit.
    """

    baseline: float = 0.0
    where: ClassVar[str] = "pipeline"

    def __call__(self, group: Group) -> Group:
        """Subtract the baseline."""
        return credit(group, (group.rewards - self.baseline).tolist())
