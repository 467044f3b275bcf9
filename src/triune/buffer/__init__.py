"""The buffer: where experience is kept, durable and prioritised, between explorer and trainer."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from triune.buffer.amendments import Reshape
from triune.buffer.candidates import Candidate, Priority
from triune.buffer.config import BufferSettings, SegmentSettings
from triune.buffer.conservation import check_conservation
from triune.buffer.database import Database
from triune.buffer.front import StoredBuffer
from triune.buffer.notebook import OpenBuffer, open
from triune.buffer.sqlite import open_database
from triune.buffer.store import Store
from triune.buffer.transfer import from_plain, to_plain


def open_buffer(
    settings: BufferSettings,
    folder: Path,
    *,
    reshape: Reshape | None = None,
    deterministic: bool = False,
    urgent_ratio: float = 0.25,
    filled: Collection[str] | None = None,
    min_group: int | None = None,
) -> StoredBuffer:
    """Open the buffer that a run file describes.

    Args:
        settings: The section `buffer:`.
        folder: The run's folder, where the database is unless its path says otherwise.
        reshape: The run's pipeline as one function: an amended raw group → shaped, None = dropped. In a process without
            it an amendment is deferred, until one of the run's leases or waits for a slot; has that one none either, it
            changes the newest revision as it is and group advantages stay what they were.
        deterministic: Lease strictly in ledger order, so that a batch does not depend on who finished first; priority
            and shares have no say.
        urgent_ratio: Urgent entries (people's) added to a batch, as a share of it.
        filled: Buffers that somebody puts to during the run; on others no lease waits. None = all.
        min_group: Members that must have their reward when the deadline of a waiting group passes, so that it goes on
            without the others; None = all.

    Raises:
        StoreError: The database cannot be opened.
        ConfigError: The priority names an order that there is not, or the segments of the buffer are elsewhere.
    """
    weights = None if deterministic or settings.shares is None else {s.value: w for s, w in settings.shares.items()}
    store = Store(
        settings.store(folder),
        lease_s=settings.lease_s,
        reward_deadline_s=settings.reward_deadline_s,
        reshape=reshape,
        min_group=min_group,
        priority=settings.priority,
        shares=weights,
        capacity=settings.capacity,
        evict=settings.evict,
        segments=settings.segments,
    )
    if settings.segments is not None:
        with store.db.transaction():
            store.blobs.attach()
    return StoredBuffer(store, settings, deterministic=deterministic, urgent_ratio=urgent_ratio, filled=filled)


__all__ = [
    "BufferSettings",
    "Candidate",
    "Database",
    "OpenBuffer",
    "Priority",
    "Reshape",
    "SegmentSettings",
    "Store",
    "StoredBuffer",
    "check_conservation",
    "from_plain",
    "open",
    "open_buffer",
    "open_database",
    "to_plain",
]
