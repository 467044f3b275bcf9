"""Settings under `buffer:` in a run file."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from triune.buffer.stores.sqlite import SQLite
from triune.settings import BrickOf, Settings


class BufferSettings(Settings):
    """Where experience is kept between explorer and trainer."""

    store: Annotated[Any, BrickOf("store")] = SQLite()
    """Where the database lives: `sqlite` (a file) or `memory` (ends with the process)."""
    lease_s: float = Field(default=60.0, gt=0)
    """How long leases and admissions of a process outlive its last heartbeat; it beats three times as often."""
    reward_deadline_s: float = Field(default=3600.0, gt=0)
    """How long a group waits for a reward that is not known yet before it expires and gives its slot back."""
    poll_s: float = Field(default=0.01, gt=0)
    """How often a waiting process looks for what other processes wrote; inside one process nothing polls."""
