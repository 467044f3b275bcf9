"""Turns rows into experience without sampling: what imitation and preference learning train on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from triune.errors import TaskError
from triune.explorer.row_reader import RowReader
from triune.ports import AdmissionRule, Buffer, Monitor, TaskStream
from triune.records import Group, GroupId, Task

BUNDLE = 64
"""Rows that are admitted and stored together, in one transaction."""


class Demonstrations:
    """Stands in the explorer's place when the algorithm learns from what rows hold.

    Args:
        tasks: Rows in training order.
        buffer: Where the experience goes, one entry a row.
        reader: Makes records of a row.
        rule: How far ahead of the trainer rows are prepared.
        monitor: For waiting lines.
    """

    def __init__(
        self, *, tasks: TaskStream, buffer: Buffer, reader: RowReader, rule: AdmissionRule, monitor: Monitor
    ) -> None:
        self._tasks, self._buffer, self.reader = tasks, buffer, reader
        self._rule, self._monitor = rule, monitor

    async def run(self) -> None:
        """Store rows until they run out or the trainer wants no more.

        consumes: Task                waits for: a free slot
        produces: one entry per row   unblocked by: the trainer's publish
        """
        await self._store([self._row_of(group) for group in await self._buffer.open_admissions()])
        cursor = await self._seek()
        drawn: list[tuple[Task, Any]] = []
        while True:
            while (again := await self._buffer.readmit(self._rule, max_retries=0)) is not None:
                await self._store([self._row_of(again)])
            while len(drawn) < BUNDLE and (entry := self._tasks.next()) is not None:
                drawn.append(entry)
            if not drawn:
                break
            with self._monitor.waiting("explorer", "a free slot"):
                groups = await self._buffer.admit_next(drawn, self._rule, after=cursor)
            if groups is None:
                break
            if groups:
                await self._store([(group, task) for group, (task, _) in zip(groups, drawn, strict=False)])
                cursor = drawn[len(groups) - 1][1]
                del drawn[: len(groups)]
            else:  # a group is due, or another process drew these rows
                cursor = await self._seek()
                drawn.clear()
        await self._buffer.end("the task sets are exhausted")

    async def _seek(self) -> Any:
        """Go to the cursor of the newest admission, and return it."""
        cursor = await self._buffer.cursor()
        self._tasks.seek(cursor)
        return cursor

    def _row_of(self, group: GroupId) -> tuple[GroupId, Task]:
        task = self._tasks.find(group.taskset, group.task_key)
        if task is None:
            raise TaskError(str(group), "its row is no longer in the task set", "the data the run started with")
        return group, task

    async def _store(self, rows: Sequence[tuple[GroupId, Task]]) -> None:
        made = [Group(id=group, task=task, records=self.reader(group, task)) for group, task in rows]
        await self._buffer.put_many([(group, group) for group in made])


class Stored:
    """Stands in the explorer's place when a run trains on what its buffer held before."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer

    async def run(self) -> None:
        """Say that nothing more will come, so that the last batch may be a short one."""
        await self._buffer.end("all experience was there before the run")
