"""The default store: one SQLite file, no server."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from triune.buffer.sqlite import SQLiteDatabase, open_database
from triune.registry import brick


@brick("store", "sqlite")
@dataclass(frozen=True, kw_only=True)
class SQLite:
    """A file in write-ahead mode; several processes on one machine may share it."""

    path: str | None = None
    """The file; null = `buffer.sqlite` in the run's folder."""
    synchronous: Literal["normal", "full", "off"] = "normal"
    """`normal` survives kill -9, and a power cut up to the last checkpoint; `full` also after it; `off` neither."""
    busy_timeout_s: float = 30.0
    """How long to wait for another process's transaction."""

    def __call__(self, folder: Path, clock: Callable[[], float] = time.time) -> SQLiteDatabase:
        """Open it, and make it when it is missing."""
        path = self.path or folder / "buffer.sqlite"
        return open_database(path, synchronous=self.synchronous, busy_timeout_s=self.busy_timeout_s, clock=clock)
