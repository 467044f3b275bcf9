"""Compute lanes for tests: on the caller's thread, on one thread of their own, or slow on command."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")


class InlineLane:
    """Runs work at once on the caller's thread: no threads, no reordering, exact stack traces."""

    def __init__(self) -> None:
        self.num_jobs = 0

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work(*args)` now; gives the event loop one turn first, as a real lane does."""
        await asyncio.sleep(0)
        self.num_jobs += 1
        return work(*args)


class ThreadLane:
    """Runs work on one thread of its own, first come first served, like the real lane.

    Args:
        delay_s: Sleep before every job, to play a lane that somebody else keeps busy.
    """

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.num_jobs = 0
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="lane")

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work(*args)` on the lane's thread; its exception is raised here."""

        def job() -> T:
            if self.delay_s:
                time.sleep(self.delay_s)
            return work(*args)

        self.num_jobs += 1
        return await asyncio.get_running_loop().run_in_executor(self._executor, job)

    def close(self) -> None:
        """Wait for the running job and end the thread."""
        self._executor.shutdown(wait=True)

    def __enter__(self) -> ThreadLane:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
