"""Tasks that were trained on least come first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from triune.buffer.candidates import Candidate
from triune.registry import brick


@brick("priority")
@dataclass(frozen=True, kw_only=True)
class Novelty:
    """Add a bonus that halves with the first use of an entry's task, is a third after the second, and so on.

    Where task sets are uneven, or some tasks come back in every epoch, this evens out how often each is trained on.
    Uses are those of this run, by entries of its own. Chosen from the highest stored priorities, the newest versions
    and the earliest admitted.

    Attributes:
        bonus: Units of priority that a task is worth that was never trained on.
        per_version: Taken off for every published step of staleness.
    """

    bonus: Annotated[float, Field(gt=0)] = 1.0
    per_version: Annotated[float, Field(ge=0)] = 0.0
    windows: ClassVar[tuple[str, ...]] = ("priority", "newest", "age")

    def __call__(self, candidate: Candidate) -> float:
        """Priority plus bonus / (1 + uses of the task)."""
        return candidate.priority + self.bonus / (1 + candidate.task_uses) - self.per_version * candidate.staleness
