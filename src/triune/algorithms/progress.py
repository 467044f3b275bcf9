"""How far a run is, for schedules inside bricks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Steps done before this one, and steps of the run."""

    step: int = 0
    num_steps: int = 1

    @property
    def fraction(self) -> float:
        """In [0, 1]: 0 at the first step."""
        return min(self.step / max(self.num_steps, 1), 1.0)
