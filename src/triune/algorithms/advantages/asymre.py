"""A baseline below the mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from triune.algorithms.advantages._statistics import centred
from triune.algorithms.credit import credit
from triune.records import Group
from triune.registry import brick


@brick("advantage", "asymre")
@dataclass(frozen=True, kw_only=True)
class AsymREAdvantage:
    """Credit each rollout with its reward minus (the group's mean plus a shift), usually a negative shift.

    On fresh samples a shift changes the variance only. On stale ones it decides: below the mean, good answers of the
    old policy are imitated more than bad ones are pushed away, and the policy improves without collapsing; above it,
    the support shrinks to few answers.

    A flat group, also one with a single valid rollout, keeps the positive advantage `-shift` on purpose, so
    dropping flat groups is refused.

    Source: AsymRE, arXiv:2506.20520, whose experiments recommend a small negative shift.

    Attributes:
        shift: Added to the baseline, in the unit of the reward.
    """

    shift: float = -0.1
    where: ClassVar[str] = "pipeline"
    least_group: ClassVar[int] = 2
    zero_on_flat: ClassVar[bool] = False

    def __call__(self, group: Group) -> Group:
        """Subtract mean and shift."""
        return credit(group, [value - self.shift for value in centred(group.rewards.tolist())])
