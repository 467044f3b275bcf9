"""The stored priority, less with age and use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from triune.buffer.candidates import Candidate
from triune.registry import brick


@brick("priority")
@dataclass(frozen=True, kw_only=True)
class LinearDecay:
    """Take something off the stored priority for every version an entry is old and for every use it had.

    Fresh entries come first, an important one stays ahead for as many versions as its priority is worth. With equal
    stored priorities it takes the newest first. Chosen from the highest stored priorities and the newest versions.

    Attributes:
        per_version: Taken off for every published step of staleness, in units of the stored priority.
        per_use: Taken off for every earlier use by this run (of entries that are replayed).
    """

    per_version: Annotated[float, Field(ge=0)] = 1.0
    per_use: Annotated[float, Field(ge=0)] = 1.0
    windows: ClassVar[tuple[str, ...]] = ("priority", "newest")

    def __call__(self, candidate: Candidate) -> float:
        """Priority minus age and uses."""
        return candidate.priority - self.per_version * candidate.staleness - self.per_use * candidate.uses
