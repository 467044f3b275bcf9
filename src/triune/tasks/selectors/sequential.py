"""As the file has them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triune.registry import brick


@brick("selector")
@dataclass(frozen=True, kw_only=True)
class Sequential:
    """Rows in their own order, in every epoch."""

    def __call__(self, positions: NDArray[np.int64], *, size: int, epoch: int, seed: int) -> NDArray[np.int64]:
        """Row numbers at these positions of an epoch."""
        return positions
