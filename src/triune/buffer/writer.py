"""One thread that owns the connection and commits together what arrives together."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple

from triune.buffer.database import TOPICS, Database, Interrupted, OutcomeUnknown
from triune.errors import StoreError

Work = Callable[[], Any]
Together = Callable[[Sequence[Any]], Sequence[Any]]
"""Does many things at once: of each item what became of it, in order."""


class Items(NamedTuple):
    """Work that shares one call of `together` with its neighbours in the queue."""

    together: Together
    items: Sequence[Any]


Job = tuple[Work | Items, asyncio.Future[Any]]
Outcome = tuple[Any, BaseException | None]


class Writer:
    """Runs jobs in order of arrival; those that wait while a transaction runs share the next one (group commit).

    A job that fails takes nobody with it: the shared transaction is rolled back and each job runs in its own. One whose
    commit was perhaps carried out is not repeated: all its jobs are told so.
    """

    def __init__(
        self, db: Database, *, poll_s: float, beat_s: float, beat: Work, wake: Callable[[set[str]], None]
    ) -> None:
        """`beat` runs in a transaction every `beat_s`; `wake` is told, on this thread, which topics changed."""
        self.db, self.poll_s, self.beat_s, self.beat, self.wake = db, poll_s, beat_s, beat, wake
        self.num_waiting = 0
        self._jobs: list[Job] = []
        self._news: set[str] = set()
        self._ready = threading.Condition()
        self._stops = self._abandons = False
        self._announced: asyncio.AbstractEventLoop | None = None
        self._polls = db.is_shared and not db.listen(self._hear)
        self._seen = db.foreign_version()
        self._next_beat = time.monotonic() + beat_s
        self._thread = threading.Thread(target=self._run, name="triune-buffer", daemon=True)
        self._thread.start()

    def submit(self, work: Work | Items) -> asyncio.Future[Any]:
        """Queue a job; its future resolves after the commit. For the thread of a running event loop.

        The future of `Items` resolves to the list of their outcomes.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        with self._ready:
            if self._stops:
                raise StoreError(self.db.where, "the buffer is closed", "an open one")
            self._jobs.append((work, future))
        if self._announced is not loop:  # once per turn of the loop, so that its calls share a transaction
            self._announced = loop
            loop.call_soon(self._announce)
        return future

    def _announce(self) -> None:
        self._announced = None
        with self._ready:
            self._ready.notify()

    def _hear(self, topics: set[str]) -> None:
        """Other processes touched these: the thread tells the waiters."""
        with self._ready:
            self._news |= topics
            self._ready.notify()

    @property
    def has_stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stops

    def stop(self, *, abandon: bool = False) -> None:
        """Finish what is queued (or drop it, as a crash would) and end the thread."""
        with self._ready:
            self._stops, self._abandons = True, abandon
            if abandon:
                self._jobs.clear()
            self._ready.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._ready:
                if not (self._jobs or self._news or self._stops):
                    self._ready.wait(self._patience())
                jobs, self._jobs = self._jobs, []
                news, self._news = self._news, set()
                stops = self._stops
            if news:
                self.wake(news)
            if jobs:
                self._commit([job for job in jobs if not job[1].cancelled()])
            elif stops:
                return
            self._look_around()

    def _patience(self) -> float:
        until_beat = max(0.0, self._next_beat - time.monotonic())
        return min(until_beat, self.poll_s) if self.num_waiting and self._polls else until_beat

    def _look_around(self) -> None:
        """Beat when it is time, and tell waiters when another process wrote. The room's boundary for both."""
        try:
            if time.monotonic() >= self._next_beat:
                self._next_beat = time.monotonic() + self.beat_s
                with self.db.transaction():
                    self.beat()
                    touched = set(self.db.touched)
                self.wake(touched)
            if self._polls and self.num_waiting:
                seen = self.db.foreign_version()
                if seen != self._seen:
                    self._seen = seen
                    self.wake(set(TOPICS))
        except Exception:
            # A beat that fails (locked, disk full) is no news by itself: the next call of its owner meets the cause.
            return

    def _commit(self, jobs: list[Job]) -> None:
        if not jobs:
            return
        outcomes: Sequence[Outcome]
        try:
            outcomes, touched = self.db.attempt(lambda: self._work(jobs), lambda: self._abandons)
        except (Interrupted, OutcomeUnknown) as error:  # patience is at an end, or they may be done: for each of them
            outcomes, touched = [(None, error)] * len(jobs), set()
        except Exception as error:
            if len(jobs) > 1:
                for job in jobs:
                    self._commit([job])
                return
            outcomes, touched = [(None, error)], set()
        self._deliver(jobs, outcomes)
        if touched:
            self.wake(touched)

    def _work(self, jobs: list[Job]) -> tuple[Sequence[Outcome], set[str]]:
        outcomes: list[Outcome] = []
        for together, part in groupby(jobs, key=lambda job: job[0].together if isinstance(job[0], Items) else None):
            if together is None:
                outcomes += [(work(), None) for work, _ in part if not isinstance(work, Items)]
                continue
            lists = [work.items for work, _ in part if isinstance(work, Items)]
            found = iter(together([item for items in lists for item in items]))
            outcomes += [(list(islice(found, len(items))), None) for items in lists]
        return outcomes, set(self.db.touched)

    def _deliver(self, jobs: list[Job], outcomes: Sequence[Outcome]) -> None:
        """Resolve the futures, each on its own loop, in one hop per loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any, BaseException | None]]] = {}
        for (_, future), (value, error) in zip(jobs, outcomes, strict=True):
            by_loop.setdefault(future.get_loop(), []).append((future, value, error))
        for loop, settled in by_loop.items():
            call_on(loop, lambda settled=settled: _settle(settled))


def _settle(settled: list[tuple[asyncio.Future[Any], Any, BaseException | None]]) -> None:
    for future, value, error in settled:
        if future.done():
            continue
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)


def call_on(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Run a callback on a loop from another thread; nothing when the loop is gone with everybody who waited on it."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        return
