"""First what moves the weights most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from triune.buffer.candidates import Candidate
from triune.registry import brick


@brick("priority")
@dataclass(frozen=True, kw_only=True)
class AdvantageWeighted:
    """Put groups with large advantages first: those whose rollouts differ most in what they earned.

    It looks at the mean absolute advantage over action tokens that the pipeline computed. An entry without advantages
    (they are computed by the trainer, or it is to be imitated) counts as one of advantage 0. Chosen from the largest
    advantages and the highest stored priorities.

    Attributes:
        weight: Units of priority that one unit of mean absolute advantage is worth.
        per_version: Taken off for every published step of staleness.
    """

    weight: Annotated[float, Field(gt=0)] = 1.0
    per_version: Annotated[float, Field(ge=0)] = 0.0
    windows: ClassVar[tuple[str, ...]] = ("advantage", "priority")

    def __call__(self, candidate: Candidate) -> float:
        """Priority plus weighted advantage."""
        return candidate.priority + self.weight * (candidate.advantage or 0.0) - self.per_version * candidate.staleness
