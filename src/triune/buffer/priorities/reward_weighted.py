"""High rewards first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from triune.buffer.candidates import Candidate
from triune.registry import brick


@brick("priority")
@dataclass(frozen=True, kw_only=True)
class RewardWeighted:
    """Put what earned more first, against the stored priority and age.

    An entry whose reward is not known counts as one of reward 0. Choosing by reward changes which tasks are trained
    on, not what is learnt of one: advantages were computed before. Chosen from the highest rewards and the highest
    stored priorities.

    Attributes:
        weight: Units of priority that one unit of mean reward is worth.
        per_version: Taken off for every published step of staleness.
    """

    weight: Annotated[float, Field(gt=0)] = 1.0
    per_version: Annotated[float, Field(ge=0)] = 0.0
    windows: ClassVar[tuple[str, ...]] = ("reward", "priority")

    def __call__(self, candidate: Candidate) -> float:
        """Priority plus weighted reward."""
        return candidate.priority + self.weight * (candidate.reward or 0.0) - self.per_version * candidate.staleness
