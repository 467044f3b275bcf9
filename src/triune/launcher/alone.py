"""A trainer in a process of its own whose explorer does not come: on what to train, and when to end."""

from __future__ import annotations

import asyncio
import time

from triune.buffer import StoredBuffer
from triune.monitor import RunMonitor

EXPLORER_S = 60.0
"""How long a trainer waits for a first explorer before what is in the buffer is all there is."""

LOOK_S = 1.0
"""How often it looks."""


async def watch_explorers(buffer: StoredBuffer, run: str, monitor: RunMonitor) -> None:
    """Look whether anybody explores for a run that never had an explorer; say so when nobody does.

    Where the run's own buffer holds what was imported, that is then all there is: the trainer uses it up, its last
    batch a short one, and ends. Where it holds nothing, the trainer goes on waiting, and so does that of a run that
    was explored before: somebody will resume its explorer.

    waits for: an explorer         unblocked by: its joining, or the trainer's end
    """
    began, is_told = time.monotonic(), False
    while not (await buffer.has_explorer() or await buffer.is_finished(run)):
        if time.monotonic() - began >= EXPLORER_S:
            late = f"no explorer came in {EXPLORER_S:g} s"
            if await buffer.has_stock():
                monitor.note(f"{late}: trains on what the buffer holds, and ends with it")
                await buffer.end(f"{late}: all experience was there before")
                return
            if not is_told:
                monitor.note(f"{late}, and the buffer is empty: start `triune explore` with the same file")
                is_told = True
        await asyncio.sleep(min(LOOK_S, EXPLORER_S))
