"""A metric over steps in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator


class Series:
    """Values of one metric by step; holds at most `capacity` points however long the run is.

    When full, neighbouring points are merged into their mean, so the resolution halves and the shape stays. First,
    last, smallest and largest value are exact.
    """

    __slots__ = ("_pending", "_points", "_stride", "capacity", "first", "last", "maximum", "minimum")

    def __init__(self, capacity: int = 256) -> None:
        self.capacity = capacity
        self.first: tuple[int, float] | None = None
        self.last: tuple[int, float] | None = None
        self.minimum, self.maximum = math.inf, -math.inf
        self._points: list[tuple[float, float]] = []
        self._pending: list[tuple[float, float]] = []
        self._stride = 1

    def add(self, step: int, value: float) -> None:
        """Append a value; NaN and infinities are kept out of the curve."""
        if not math.isfinite(value):
            return
        self.last = point = (step, value)
        if self.first is None:
            self.first = point
        if value < self.minimum:
            self.minimum = value
        if value > self.maximum:
            self.maximum = value
        if self._stride > 1:
            self._pending.append(point)
            if len(self._pending) < self._stride:
                return
            point = _mean(self._pending)
            self._pending.clear()
        self._points.append(point)
        if len(self._points) >= self.capacity:
            self._points = [_mean(self._points[i : i + 2]) for i in range(0, len(self._points), 2)]
            self._stride *= 2

    def __iter__(self) -> Iterator[tuple[float, float]]:
        yield from self._points
        if self._pending:
            yield _mean(self._pending)

    def __len__(self) -> int:
        return len(self._points) + bool(self._pending)


def _mean(points: list[tuple[float, float]]) -> tuple[float, float]:
    return sum(p[0] for p in points) / len(points), sum(p[1] for p in points) / len(points)
