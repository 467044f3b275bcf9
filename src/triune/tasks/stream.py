"""Tasks in training order: several task sets mixed by weight, resumable at any point."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from triune.errors import TaskError
from triune.records import Task
from triune.tasks.counter_random import mix
from triune.tasks.taskset import OpenTaskset


class Selector(Protocol):
    """Row numbers at given positions of an epoch: a permutation of [0, size) for every epoch and seed."""

    def __call__(self, positions: NDArray[np.int64], *, size: int, epoch: int, seed: int) -> NDArray[np.int64]: ...


ORDERED = 1024
"""For how many tasks the order is worked out at once."""


class Track:
    """One task set inside a mix: how many of its tasks were drawn, and the next few made ready."""

    def __init__(self, taskset: OpenTaskset, order: Selector, epochs: int | None, seed: int) -> None:
        self.taskset, self.weight = taskset, taskset.settings.weight
        self._order, self._seed = order, mix(seed, taskset.name)
        size = taskset.size
        self.total = None if size is None or epochs is None else size * epochs
        self.count = 0
        self._ready: list[Task] = []
        self._rows: list[int] = []

    @property
    def is_over(self) -> bool:
        """Whether every epoch of this set was drawn."""
        return self.count == self.total

    def draw(self) -> Task:
        """The task at `count`, which moves on."""
        if not self._ready:
            self._refill()
        self.count += 1
        return self._ready.pop()

    def seek(self, count: int) -> None:
        """Go to another position."""
        self.count = count
        self._ready.clear()
        self._rows.clear()

    def _refill(self) -> None:
        """Make a block of tasks ready, last one first; blocks end with their epoch."""
        if not self._rows:
            self._rows = self._next_rows()
        block = self.taskset.block
        self._ready = self.taskset.tasks(self._rows[:block])[::-1]
        del self._rows[:block]

    def _next_rows(self) -> list[int]:
        size = self.taskset.size
        if size is None:
            return list(range(self.count, self.count + ORDERED))
        epoch, start = divmod(self.count, size)
        positions = np.arange(start, min(start + ORDERED, size))
        return self._order(positions, size=size, epoch=epoch, seed=self._seed).tolist()


class MixedTasks:
    """Tasks of several sets in training order; implements the port `TaskStream`.

    The next task comes from the set that is furthest behind its share, so after n tasks every set is within about
    one task of its share of n, without randomness. A set that is over leaves the mix; the stream ends when all are
    over. The cursor is how many tasks each set gave, from which everything else follows.
    """

    def __init__(self, tasksets: Sequence[OpenTaskset], *, order: Selector, epochs: int | None, seed: int) -> None:
        self._tracks = [Track(taskset, order, epochs, seed) for taskset in tasksets]
        self._by_name = {track.taskset.name: track for track in self._tracks}
        assert len(self._by_name) == len(self._tracks), "names are made unique when the settings are read"

    @property
    def data_hash(self) -> str:
        """Hash over the rows, mapping and limit of all sets, in order."""
        parts = "\n".join(track.taskset.data_hash for track in self._tracks)
        return hashlib.blake2b(parts.encode(), digest_size=8).hexdigest()

    def next(self) -> tuple[Task, Mapping[str, int]] | None:
        """The next task and the cursor after it; None at the end."""
        track = self._tracks[0] if len(self._tracks) == 1 else self._furthest_behind()
        if track is None or track.count == track.total:
            return None
        task = track.draw()
        return task, {name: each.count for name, each in self._by_name.items()}

    def seek(self, cursor: Any) -> None:
        """Go on after `cursor`; None = from the start.

        Raises:
            TaskError: The cursor is of other task sets.
        """
        cursor = dict.fromkeys(self._by_name, 0) if cursor is None else cursor
        if not isinstance(cursor, Mapping) or cursor.keys() != self._by_name.keys():
            raise TaskError(
                "tasks",
                f"the run stopped at {cursor!r}",
                f"the task sets {', '.join(self._by_name)}",
                "name the sets as before, or start a new run",
            )
        for name, track in self._by_name.items():
            track.seek(int(cursor[name]))

    def find(self, taskset: str, key: str) -> Task | None:
        """A task by identity."""
        track = self._by_name.get(taskset)
        return track.taskset.find(key) if track else None

    def _furthest_behind(self) -> Track | None:
        live = [track for track in self._tracks if track.count != track.total]
        if len(live) < 2:
            return live[0] if live else None
        per_weight = (1 + sum([track.count for track in live])) / sum([track.weight for track in live])
        behind = [track.weight * per_weight - track.count for track in live]
        return live[behind.index(max(behind))]
