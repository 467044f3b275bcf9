"""Plug-in of the crash campaign: a workflow slow enough to be killed in, and a sampling that keeps a diary.

Both leave a file named by their process in the folder TRIUNE_CRASH_BEGAN, so that the campaign knows that work began.
"""

from __future__ import annotations

import asyncio
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

from triune import Model, Task
from triune.algorithms.samplings.fifo import Fifo
from triune.ports import Buffer, Leases
from triune.registry import brick


def say_begun() -> None:
    """Leave the file, where somebody asked for it."""
    folder = os.environ.get("TRIUNE_CRASH_BEGAN")
    if folder:
        Path(folder, str(os.getpid())).touch()


@brick("workflow", "unhurried")
@dataclass(frozen=True, kw_only=True)
class Unhurried:
    """Ask the model before and after a pause; the reward is a hash of the answer, so that groups are seldom flat."""

    pause_s: float = 0.1

    async def __call__(self, task: Task, model: Model) -> float:
        say_begun()
        chat = model.chat()
        await chat.ask(task.data["question"])
        await asyncio.sleep(self.pause_s)
        answer = await chat.ask("Sure?")
        return float(zlib.crc32(answer.encode()) % 2)


@brick("sampling", "diary")
@dataclass(frozen=True, kw_only=True)
class Diary(Fifo):
    """First in, first out, and every batch is written to a file of its own account before it is trained on."""

    path: str = "diary.jsonl"

    async def __call__(
        self, buffer: Buffer, num: int, *, step: int = 0, max_staleness: int | None = None, ahead: int | None = None
    ) -> Leases:
        say_begun()
        leases = await super().__call__(buffer, num, step=step, max_staleness=max_staleness, ahead=ahead)
        uses = [(lease.entry, lease.use_no, lease.staleness) for lease in leases]
        line = json.dumps({"pid": os.getpid(), "uses": uses}) + "\n"
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)
        return leases
