"""The store of tests and throw-away runs: it ends with the process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from triune.buffer.sqlite import SQLiteDatabase, open_database
from triune.registry import brick


@brick("store")
@dataclass(frozen=True, kw_only=True)
class Memory:
    """SQLite without a file: the same behaviour, nothing survives, nobody else can join."""

    def __call__(self, folder: Path, clock: Callable[[], float] = time.time) -> SQLiteDatabase:
        """Open an empty one."""
        return open_database(":memory:", synchronous="off", clock=clock)
