"""Several sources that wait in one buffer take turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


class Turns:
    """Stride scheduling: the source that is furthest behind its share comes next.

    Whatever the size of a lease, over many of them every source that always has something gets its share to within
    one entry; a source that has nothing leaves its turns to the others and saves none up. Where the turns stand is not
    stored: a new process begins with nobody behind.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """`weights`: source → weight; sources without one weigh 1."""
        self.weights = dict(weights)
        self._clock, self._passes = 0.0, dict[str, float]()
        self._planned = (self._clock, self._passes)

    def plan(self, waiting: Mapping[str, Sequence[T]], num: int) -> list[T]:
        """Up to `num` items in the order of their turns; nothing counts before `commit`."""
        clock = self._clock
        known = {source: value for source, value in self._passes.items() if value >= clock}
        start = min((known[source] for source in waiting if source in known), default=clock)
        passes = {**self._passes, **{source: known.get(source, start) for source in waiting}}
        taken = dict.fromkeys(waiting, 0)
        chosen: list[T] = []
        while len(chosen) < num:
            left = [source for source, items in waiting.items() if taken[source] < len(items)]
            if not left:
                break
            source = min(left, key=lambda name: (passes[name], name))
            chosen.append(waiting[source][taken[source]])
            taken[source] += 1
            clock = max(clock, passes[source])
            passes[source] += 1.0 / self.weights.get(source, 1.0)
        self._planned = (clock, passes)
        return chosen

    def commit(self) -> Callable[[], None]:
        """What was planned last was granted; what it returns takes that back."""
        before = (self._clock, self._passes)
        self._clock, self._passes = self._planned

        def restore() -> None:
            self._clock, self._passes = before

        return restore
