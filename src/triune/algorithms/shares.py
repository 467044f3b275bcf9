"""Whole numbers of entries a step that add up to fractions over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

_ROUNDING = 1e-9
"""What sums and products of decimal fractions may be off by."""


def whole_shares(shares: Sequence[float], num: int, step: int) -> list[int]:
    """Divide the `num` entries of a step among shares that sum to 1.

    Three quarters of 10 are 7 and 8 in turn. Over the first n steps the first share gets `floor(share x num x n)`,
    never more than admission lets in for a `fresh_ratio` of that share; every other is within one of its due.

    Args:
        shares: Fractions, the one that is freshly sampled first.
        num: Entries of every step.
        step: Steps that are done; the same step always gives the same numbers, so a resumed run goes on alike.

    Returns:
        One number per share; they sum to `num`.
    """
    bounds = [*accumulate(shares)][:-1]
    before, after = (
        [0, *(math.floor(bound * n + _ROUNDING) for bound in bounds), n] for n in (num * step, num * step + num)
    )
    return [(b - a) - (b0 - a0) for (a, b), (a0, b0) in zip(pairwise(after), pairwise(before), strict=True)]
