"""Puts an expert's answers into a buffer of their own, beside what is sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from triune.explorer.row_reader import RowReader
from triune.ports import TaskStream
from triune.records import Group, GroupId, Task

EXPERT = "expert"
"""The buffer they go to."""


class Stock(Protocol):
    """What the store offers for entries that nobody sampled; they take no slot."""

    async def stock(self, groups: Sequence[Group], *, buffer: str) -> int:
        """Store groups, idempotent by id."""
        ...

    async def stocked(self, buffer: str) -> Mapping[str, int]:
        """How many groups of each task set were ever stocked."""
        ...

    async def shortage(self, buffer: str, ahead: int) -> int | None:
        """Wait until fewer than `ahead` are unused; how many are missing, None once the run is over."""
        ...


class ExpertAnswers:
    """Keeps a few steps' worth of answers ready, read from rows in order.

    Nothing but the number of answers stored so far decides which comes next, so a resumed run goes on where it stopped,
    and several explorers of a run store the same ones once. Every answer has the stream `advantages`, 0: no reward was
    given for it.

    Args:
        run: Name of the run.
        tasks: Rows with answers, without end.
        stock: Where they go.
        reader: Makes an experience of a row.
        ahead: How many to keep ready, at least what one step takes.
    """

    def __init__(self, *, run: str, tasks: TaskStream, stock: Stock, reader: RowReader, ahead: int) -> None:
        self._run, self._tasks, self._stock, self._reader, self._ahead = run, tasks, stock, reader, ahead

    async def run(self) -> None:
        """Store answers until the trainer wants no more.

        consumes: rows with answers      waits for: a step that takes some
        produces: one entry per answer   unblocked by: the trainer's lease, or its end
        """
        self._tasks.seek(self._cursor(await self._stock.stocked(EXPERT)))
        while (missing := await self._stock.shortage(EXPERT, self._ahead)) is not None:
            await self._stock.stock([self._next() for _ in range(missing)], buffer=EXPERT)

    def _cursor(self, stocked: Mapping[str, int]) -> Any:
        """Where the rows go on after so many of each task set."""
        self._tasks.seek(None)
        entry = self._tasks.next()
        assert entry is not None, "task sets are not empty"
        return {name: stocked.get(name, 0) for name in entry[1]}

    def _next(self) -> Group:
        entry = self._tasks.next()
        assert entry is not None, "answers are read without end"
        task, cursor = entry
        return self._group(GroupId(self._run, task.taskset, task.key, cursor[task.taskset] - 1), task)

    def _group(self, group: GroupId, task: Task) -> Group:
        answer = self._reader.answer(group, task)
        nothing = np.zeros(len(answer), dtype=np.float32)
        return Group(id=group, task=task, records=(answer.with_streams(advantages=nothing),))
