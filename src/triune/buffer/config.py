"""Settings under `buffer:` in a run file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from triune.buffer.segments_places import check_url, is_relative
from triune.buffer.stores.memory import Memory
from triune.buffer.stores.postgres import Postgres
from triune.buffer.stores.sqlite import SQLite
from triune.records import Source
from triune.settings import BrickOf, Settings


class SegmentSettings(Settings):
    """Files beside the database for large records: it stays small, and so do its backups and its vacuum."""

    url: Annotated[str, Field(min_length=1)] = "segments"
    """A folder that all processes see, relative to that of the SQLite file, or a URL of fsspec (`s3://bucket/prefix`).
    The buffer makes a folder of its own in it."""
    min_bytes: Annotated[int, Field(ge=0)] = 65536
    """Revisions of at least this size are kept there, smaller ones in their rows."""
    roll_bytes: Annotated[int, Field(ge=1)] = 64 * 2**20
    """A process begins a new file when its last one has this size; an object store gets an object per transaction."""

    @field_validator("url")
    @classmethod
    def _has_no_password(cls, url: str) -> str:
        return check_url(url)


class BufferSettings(Settings):
    """Where experience is kept between explorer and trainer."""

    store: Annotated[Any, BrickOf("store")] = SQLite()
    """Where the database lives: `sqlite` (a file), `postgres` (a server) or `memory` (ends with the process)."""
    segments: SegmentSettings | None = None
    """Keep large records in files beside the database, e.g. `{min_bytes: 65536}`; null = in their rows."""
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

    @model_validator(mode="after")
    def _segments_stay_with_the_store(self) -> BufferSettings:
        if self.segments is None:
            return self
        if isinstance(self.store, Memory):
            raise ValueError("found segments beside a store in memory; expected sqlite or postgres, which stay")
        if isinstance(self.store, Postgres) and is_relative(self.segments.url):
            raise ValueError(
                f"found segments.url {self.segments.url!r} beside a server; "
                "expected a URL or a path from the root, so that all machines find it"
            )
        return self
