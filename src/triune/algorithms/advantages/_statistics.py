"""Means and deviations of a few numbers, exactly 0 where nothing differs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

Std = Literal["sample", "population"]
"""sample: squares are divided by their number less one. population: by their number."""


def centred(values: Sequence[float]) -> list[float]:
    """Values minus their mean; exactly 0 where all are equal, whatever their mean rounds to."""
    if not values or max(values) == min(values):
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]


def deviation(values: Sequence[float], std: Std) -> float:
    """Standard deviation of values whose mean is 0."""
    squares = math.fsum(value * value for value in values)
    return math.sqrt(squares / max(len(values) - (std == "sample"), 1))


def standardised(values: Sequence[float], std: Std, epsilon: float) -> list[float]:
    """Centred values over their deviation plus epsilon; exactly 0 where all are equal."""
    found = centred(values)
    if not any(found):
        return found
    scale = deviation(found, std) + epsilon
    return [value / scale for value in found]


def centred_ranks(values: Sequence[float]) -> list[float]:
    """Ranks from -0.5 (smallest) to 0.5 (largest), equal values sharing the mean of theirs; they sum to 0."""
    below = [sum(other < value for other in values) for value in values]
    equal = [sum(other == value for other in values) for value in values]
    last = max(len(values) - 1, 1)
    return [
        (less + (same - 1) / 2) / last - (0.5 if len(values) > 1 else 0.0)
        for less, same in zip(below, equal, strict=True)
    ]
