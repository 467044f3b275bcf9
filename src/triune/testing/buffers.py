"""Buffers over one store with a clock that moves by hand, and the few calls that every test of a buffer makes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from triune.buffer import BufferSettings, Database, SegmentSettings, StoredBuffer, open_buffer
from triune.buffer.stores.memory import Memory
from triune.buffer.stores.sqlite import SQLite
from triune.ports import AdmissionRule, WeightUpdate
from triune.records import Task
from triune.testing.groups import make_group, with_mean_advantages
from triune.testing.postgres import OnTestServer

T = TypeVar("T")

ROOMY = AdmissionRule(max_staleness=0, fresh=1000)
"""A rule under which there is always a slot."""

BACKENDS: dict[str, Any] = {"memory": Memory(), "sqlite": SQLite(), "segments": SQLite(), "postgres": OnTestServer()}
"""Every store that the contract suite runs over; a new backend is one more entry."""

SEGMENTS = {"segments": SegmentSettings(min_bytes=0, roll_bytes=20_000)}
"""Backends that keep every revision outside of the database."""


_SETTINGS = ("priority", "capacity", "evict", "shares", "reward_deadline_s", "segments")


class BufferWorld:
    """Processes that share one store: `open` is what a new one sees, `crash` ends one without a word."""

    def __init__(self, store: Any, folder: Path, segments: SegmentSettings | None = None) -> None:
        self.store, self.folder, self.segments = store, folder, segments
        self.time = 1000.0
        self._buffers: list[StoredBuffer] = []
        self._memory: Database | None = None

    def open(self, **options: Any) -> StoredBuffer:
        """The first buffer, or another process's. Options are those of `open_buffer` and of section `buffer:`."""
        chosen = {name: options.pop(name) for name in _SETTINGS if name in options}
        chosen = {"segments": self.segments, "lease_s": 60, "poll_s": 0.005, **chosen}
        settings = BufferSettings(store=lambda folder: self._database(), **chosen)
        buffer = open_buffer(settings, self.folder, **{"reshape": with_mean_advantages, **options})
        self._buffers.append(buffer)
        return buffer

    def _database(self) -> Database:
        if not isinstance(self.store, Memory):
            return self.store(self.folder, lambda: self.time)
        self._memory = self._memory or self.store(self.folder, lambda: self.time)
        return self._memory

    async def start(self, run: str = "r", **options: Any) -> StoredBuffer:
        """Open a buffer and begin an incarnation of a run."""
        buffer = self.open(**options)
        await buffer.open_run(run, config_hash="", data_hash="")
        return buffer

    def crash(self, buffer: StoredBuffer) -> None:
        """The process is gone without a word."""
        buffer.abandon()
        if self._memory is None:
            buffer.store.db.close()

    def end(self) -> None:
        """All processes are gone."""
        for buffer in self._buffers:
            self.crash(buffer)


async def publish(buffer: StoredBuffer, step: int) -> int:
    """Publish weights that do not exist; their version."""
    version = await buffer.begin_version(step)
    await buffer.commit_version(WeightUpdate(version=version, step=step, digest="d", dtype="float32"))
    return version


async def fill(buffer: StoredBuffer, num: int, **options: Any) -> list[str]:
    """Admit and put `num` groups of tasks `t0`, `t1`, …, shaped; their entries."""
    entries = []
    for _ in range(num):
        key = f"t{int((await buffer.stats())['admitted'])}"
        group = await buffer.admit(Task(key=key), ROOMY, cursor={"at": key})
        assert group is not None, "there is always a slot"
        raw = make_group(group, **options)
        entries.append(await buffer.put(raw, with_mean_advantages(raw)))
    return entries


async def put_group(buffer: StoredBuffer, key: str, **options: Any) -> str:
    """Admit a task and put its group as it is; its entry. Options are those of `make_group`."""
    group = await buffer.admit(Task(key=key), ROOMY)
    assert group is not None, "there is always a slot"
    made = make_group(group, **options)
    return await buffer.put(made, made)


async def states(buffer: StoredBuffer) -> dict[str, str]:
    """Entry → state."""
    return {info.entry: info.state.value for info in await buffer.browse(limit=1000)}


async def stays_waiting(work: Coroutine[Any, Any, T], seconds: float = 0.05) -> asyncio.Task[T]:
    """Start a call and see that it does not return."""
    task = asyncio.ensure_future(work)
    await asyncio.sleep(seconds)
    assert not task.done(), "it returned at once"
    return task


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a test's coroutine, for at most half a minute."""
    return asyncio.run(asyncio.wait_for(work, 30))
