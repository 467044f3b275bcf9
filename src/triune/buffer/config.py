"""Settings under `buffer:` in a run file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from triune.buffer.stores.sqlite import SQLite
from triune.records import Source
from triune.settings import BrickOf, Settings


class BufferSettings(Settings):
    """Where experience is kept between explorer and trainer."""

    store: Annotated[Any, BrickOf("store")] = SQLite()
    """Where the database lives: `sqlite` (a file), `postgres` (a server) or `memory` (ends with the process)."""
    lease_s: float = Field(default=60.0, gt=0)
    """How long leases and admissions of a process outlive its last heartbeat; it beats three times as often."""
    reward_deadline_s: float = Field(default=3600.0, gt=0)
    """How long a group waits for a reward that is not known yet before it expires and gives its slot back."""
    poll_s: float = Field(default=0.01, gt=0)
    """How often a waiting process looks for what others wrote; inside one process, and on a server, nothing polls."""
    priority: Annotated[Any, BrickOf("priority")] = None
    """Which entries are trained on first, wherever the sampling does not ask for another order itself: a priority, or
    `module:function`, evaluated anew at every lease. null = the sampling alone decides."""
    capacity: Annotated[int, Field(ge=1)] | None = None
    """How many entries may wait for their first use in one buffer; beyond it some are evicted. Each process that puts
    may pass it by less than a 64th, and leases that are given back come on top. null = any number."""
    evict: Literal["oldest", "lowest", "stalest"] = "oldest"
    """Which are evicted: admitted first, of the lowest priority, or sampled by the oldest version; ties by age."""
    shares: dict[Source, Annotated[float, Field(gt=0)]] | None = None
    """Weights of sources (`policy`, `expert`, `imported`, …) that wait in one buffer at once, of which every lease
    takes in proportion; those not named weigh 1. null = the order alone decides."""
