"""Notices user code that blocks the event loop, and names it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import sysconfig
import threading
import time
import traceback
from pathlib import Path

log = logging.getLogger("triune.explorer")


class Watchdog:
    """A thread that watches whether the loop still turns; started when code that is not ours runs inline.

    It cannot end what blocks: code in the explorer's own process can only be asked. It says which line it is, once for
    each, so that whoever wrote it knows what to move into a runner process.

    Args:
        limit_s: Seconds without a turn of the loop that are worth a warning.
    """

    def __init__(self, limit_s: float = 1.0) -> None:
        self._limit_s = limit_s
        self._ticks = 0
        self._told: set[str] = set()
        self._stops = threading.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Watch the running loop; a second call does nothing."""
        if self._thread is None or not self._thread.is_alive():
            loop = asyncio.get_running_loop()
            self._tick(loop)
            arguments = (loop, threading.get_ident())
            self._thread = threading.Thread(target=self._watch, args=arguments, name="triune-watchdog", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._stops.set()
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ticks += 1
        self._timer = loop.call_later(self._limit_s / 4, self._tick, loop)

    def _watch(self, loop: asyncio.AbstractEventLoop, thread: int) -> None:
        seen, since = -1, time.monotonic()
        while not self._stops.wait(self._limit_s / 4) and loop.is_running():
            if self._ticks != seen:
                seen, since = self._ticks, time.monotonic()
            elif time.monotonic() - since >= self._limit_s:
                self._name(thread, time.monotonic() - since)

    def _name(self, thread: int, seconds: float) -> None:
        frame = sys._current_frames().get(thread)
        if frame is None:
            return
        at = _user_line(traceback.extract_stack(frame))
        if at is not None and at not in self._told:
            self._told.add(at)
            log.warning(
                "%s blocks the event loop since %.1f s: no rollout goes on, no deadline holds; "
                "await there, or write explorer.runner: process",
                at,
                seconds,
            )


_OURS = str(Path(__file__).parents[1])
_STANDARD = sysconfig.get_path("stdlib")
_INSTALLED = sysconfig.get_path("purelib")


def _user_line(stack: traceback.StackSummary) -> str | None:
    """The innermost line under the event loop that is neither ours nor a library's; None when there is none."""
    under = list(itertools.dropwhile(lambda entry: not entry.filename.endswith("asyncio/events.py"), stack))
    theirs = [e for e in under if not e.filename.startswith((_OURS, _INSTALLED)) and not _is_standard(e.filename)]
    installed = [e for e in under if e.filename.startswith(_INSTALLED)]
    chosen = theirs or installed
    return f"{chosen[-1].filename}:{chosen[-1].lineno} in {chosen[-1].name}" if chosen else None


def _is_standard(path: str) -> bool:
    return path.startswith((_STANDARD, "<"))
