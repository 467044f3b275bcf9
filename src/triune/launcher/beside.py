"""An explorer's view of the trainer in another process: find it, notice when it is gone, when another takes over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from triune.buffer import StoredBuffer
from triune.buffer.stores.postgres import MARK
from triune.config import RunConfig, check_same_run
from triune.errors import CheckpointError, ConfigError, FencedError, StoreError
from triune.monitor import RunMonitor

T = TypeVar("T")

JOIN_TIMEOUT_S = 120.0
"""How long an explorer waits for its trainer to open the run."""

FINISHED_S = 10.0
"""How long it waits for a finished run to be resumed."""

GONE_S = 120.0
"""How long an explorer waits for a trainer whose heart has stopped to be resumed."""

LOOK_S = 1.0
"""How often it looks."""


async def join_trainer(open_store: Callable[[], StoredBuffer], run: str, monitor: RunMonitor) -> StoredBuffer | None:
    """Wait for a trainer to open the run; the store, with the run joined.

    The file is opened anew now and then: a trainer that begins again with `--restart` moves the old one aside.

    Returns:
        None when the run is finished, and nobody resumes it.

    Raises:
        StoreError: None did in time.
    """
    began = time.monotonic()
    with monitor.waiting("explorer", "the trainer to open the run"):
        while True:
            left = JOIN_TIMEOUT_S - (time.monotonic() - began)
            try:
                buffer = open_store()
            except StoreError:  # in the middle of being moved, or never there
                if left <= 0:
                    raise
                await asyncio.sleep(LOOK_S)
                continue
            try:
                await buffer.join_run(run, timeout_s=min(max(left, 0.0), 5.0))
                return buffer
            except StoreError as error:
                is_finished = await buffer.is_finished(run)
                await buffer.close()
                if not isinstance(error.__cause__, TimeoutError):
                    raise
                if is_finished and time.monotonic() - began > FINISHED_S:
                    return None
                if left <= 0:
                    found = f"nobody has it open after {JOIN_TIMEOUT_S:.0f} s"
                    raise StoreError(error.where, found, error.expected, error.do) from None


def check_same_file(config: RunConfig, folder: Path) -> None:
    """Refuse to explore with other settings than the trainer's: bounds of staleness or group sizes would not fit.

    Raises:
        ConfigError: Names every setting that differs, with both values.
    """
    try:
        check_same_run(config, folder)
    except CheckpointError as error:
        found = error.found.replace("the configuration has changed", "differs from the trainer that was joined")
        expected, do = "the trainer's configuration", "give both commands the same file and overrides"
        raise ConfigError(f"explore beside {folder}", found, expected, do) from None


async def watch_trainer(buffer: StoredBuffer, monitor: RunMonitor, folder: Path) -> None:
    """Look after the trainer until it has finished; `folder` is the run's.

    Raises:
        FencedError: The run was resumed or begun again: join it anew.
        StoreError: The trainer's heart stopped, and nobody resumed it.
    """
    moved = _moves(buffer, folder)
    while not (state := await buffer.trainer()).is_finished:
        if not state.is_alive:
            await _wait_for_another(buffer, monitor, moved)
        elif not state.is_same or moved():
            raise _another()
        await asyncio.sleep(LOOK_S)


async def while_watched(work: Coroutine[Any, Any, T], buffer: StoredBuffer, monitor: RunMonitor, folder: Path) -> T:
    """Await something that the trainer brings about; raises what `watch_trainer` raises meanwhile."""
    job, watch = asyncio.ensure_future(work), asyncio.ensure_future(watch_trainer(buffer, monitor, folder))
    try:
        await asyncio.wait({job, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            watch.result()
        return await job
    finally:
        for task in (job, watch):
            task.cancel()


async def _wait_for_another(buffer: StoredBuffer, monitor: RunMonitor, moved: Callable[[], bool]) -> None:
    """Return when the trainer turns out to be alive; what it was is not lost, so somebody may well resume it."""
    deadline = time.monotonic() + GONE_S
    with monitor.waiting("explorer", "the trainer, whose heart has stopped, to be resumed"):
        while time.monotonic() < deadline:
            state = await buffer.trainer()
            if not state.is_same or moved():
                raise _another()
            if state.is_alive or state.is_finished:
                return
            await asyncio.sleep(LOOK_S)
    raise StoreError(
        f"the trainer's entry in {buffer.store.db.where}",
        f"its heart stopped, and nobody resumed it for {GONE_S:.0f} s",
        "a trainer that trains",
        "resume it with `triune train FILE --resume`, then explore again",
    )


def _another() -> FencedError:
    return FencedError("the trainer", "another incarnation of the run has begun", "the one that was joined", "join it")


def _moves(buffer: StoredBuffer, folder: Path) -> Callable[[], bool]:
    """Whether the run keeps its store elsewhere since now: `--restart` takes the old one with the old folder."""
    schema, opened = getattr(buffer.store.db, "schema", ""), _file_of(buffer)
    if not schema:
        return lambda: _file_of(buffer) != opened
    is_named = getattr(buffer.settings.store, "schema", None) is not None  # then no folder has a say
    return lambda: not is_named and _schema_in(folder) not in ("", schema)


def _file_of(buffer: StoredBuffer) -> int | None:
    """Which file stands at the store's path; None while there is none."""
    try:
        return Path(buffer.store.db.where).stat().st_ino
    except OSError:
        return None


def _schema_in(folder: Path) -> str:
    """The schema that a run's folder names; "" while it names none."""
    try:
        return (folder / MARK).read_text().strip()
    except OSError:
        return ""
