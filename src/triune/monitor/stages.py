"""Clocks of a run: how long each stage took, who waits for what and since when, and how idle each role was."""

from __future__ import annotations

import threading
from collections.abc import Callable

Clock = Callable[[], float]


class Timed:
    """Context manager that adds the time inside it to a stage."""

    __slots__ = ("_clock", "_stage", "_stages", "_start")

    def __init__(self, stages: Stages, stage: str, clock: Clock) -> None:
        self._stages, self._stage, self._clock = stages, stage, clock

    def __enter__(self) -> None:
        self._start = self._clock()

    def __exit__(self, *_: object) -> None:
        self._stages.add(self._stage, self._clock() - self._start)


class Stages:
    """Seconds per stage since they were last taken. Stages that overlap in time are each counted in full."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}

    def timed(self, stage: str) -> Timed:
        """Measure a `with` block; `stage`, or `role/stage` to be counted in that role's rows only."""
        return Timed(self, stage, self._clock)

    def add(self, stage: str, seconds: float) -> None:
        """Count seconds measured elsewhere (a worker process, the lane)."""
        with self._lock:
            self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds

    def take(self, role: str) -> dict[str, float]:
        """What was counted for a role or for no role, as `time/<stage>_s`, and forget it."""
        if not self._seconds:
            return {}
        taken: dict[str, float] = {}
        with self._lock:
            for stage in list(self._seconds):
                owner, slash, name = stage.partition("/")
                if not slash or owner == role:
                    taken[f"time/{name or owner}_s"] = self._seconds.pop(stage)
        return taken


class Wait:
    """One role waiting for one thing."""

    __slots__ = ("_waits", "role", "said_s", "since_s", "what")

    def __init__(self, waits: Waits, role: str, what: str) -> None:
        self._waits, self.role, self.what = waits, role, what
        self.since_s = self.said_s = 0.0

    def __enter__(self) -> None:
        self._waits.begin(self)

    def __exit__(self, *_: object) -> None:
        self._waits.end(self)


class Waits:
    """Open waits of all roles. A role is idle while at least one of its waits is open."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open: list[Wait] = []
        self._idle: dict[str, float] = {}
        self._idle_since: dict[str, float] = {}
        self._taken: dict[str, float] = {}
        self._start = clock()

    def waiting(self, role: str, what: str) -> Wait:
        """Inside the `with` block, `role` waits for `what`."""
        return Wait(self, role, what)

    def begin(self, wait: Wait) -> None:
        with self._lock:
            wait.since_s = wait.said_s = now = self._clock()
            self._open.append(wait)
            self._idle_since.setdefault(wait.role, now)

    def end(self, wait: Wait) -> None:
        with self._lock:
            self._open.remove(wait)
            if all(other.role != wait.role for other in self._open):
                self._count_idle(wait.role, self._clock())
                del self._idle_since[wait.role]

    def _count_idle(self, role: str, now: float) -> None:
        self._idle[role] = self._idle.get(role, 0.0) + now - self._idle_since[role]
        self._idle_since[role] = now

    def take_idle_ratio(self, role: str) -> float:
        """Share of the time since the last call (or since the start) that the role waited."""
        with self._lock:
            now = self._clock()
            if role in self._idle_since:
                self._count_idle(role, now)
            elapsed = now - self._taken.get(role, self._start)
            self._taken[role] = now
            idle = self._idle.pop(role, 0.0)
        return min(1.0, idle / elapsed) if elapsed > 0 else 0.0

    def due(self, heartbeat_s: float) -> list[str]:
        """Sentences about waits that nobody was told of for `heartbeat_s`."""
        with self._lock:
            now = self._clock()
            late = [wait for wait in self._open if now - wait.said_s >= heartbeat_s]
            for wait in late:
                wait.said_s = now
        return [f"{w.role} waits for {w.what} since {now - w.since_s:.0f} s" for w in late]

    def open(self) -> list[str]:
        """Sentences about all open waits, for the live display."""
        with self._lock:
            now = self._clock()
            return [f"{w.role} waits for {w.what} since {now - w.since_s:.0f} s" for w in self._open]
