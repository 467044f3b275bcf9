"""In a new random order every epoch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triune.registry import brick
from triune.tasks.counter_random import mix, permuted


@brick("selector")
@dataclass(frozen=True, kw_only=True)
class Shuffled:
    """A permutation of its own for every epoch, computed and never stored: resuming needs only the position.

    Attributes:
        seed: None = the run's.
    """

    seed: int | None = None

    def __call__(self, positions: NDArray[np.int64], *, size: int, epoch: int, seed: int) -> NDArray[np.int64]:
        """Row numbers at these positions of an epoch."""
        return permuted(positions, size, mix(seed if self.seed is None else self.seed, epoch))
