"""Rows of `entries` that are new: many in one statement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from triune.buffer.database import Database
from triune.buffer.parcels import Parcel
from triune.ports import EntryState, Refund


class Put(NamedTuple):
    """A group to be put, and how.

    Attributes:
        parcel: The group.
        dropped_by: Operator that dropped it; "" = none.
        buffer: Named buffer.
        deadline_s: How long it waits for its reward.
        refund: Why it cannot be trained on; None = it can.
    """

    parcel: Parcel
    dropped_by: str = ""
    buffer: str = "main"
    deadline_s: float = 0.0
    refund: Refund | None = None


class NewEntry(NamedTuple):
    """The columns of a new row, in the order of `_INSERT`."""

    entry: str
    buffer: str
    scope: str
    state: str
    reason: str
    class_: int
    score: float
    ledger: int
    admission: int | None
    revision: int
    oldest_version: int
    newest_version: int
    num_records: int
    reward: float | None
    source: str
    attempts: str
    epoch: int
    deadline: float | None
    created: float
    task: str
    advantage: float | None


_INSERT = (
    "INSERT INTO entries(entry, buffer, scope, state, reason, class, score, ledger, admission, revision, "
    "oldest_version, newest_version, num_records, reward, source, attempts, epoch, deadline, created, task, "
    "advantage, max_uses) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1) "
    "ON CONFLICT(entry) DO NOTHING"
)


def new_entry(
    parcel: Parcel,
    buffer: str,
    scope: str,
    state: EntryState,
    reason: str,
    ledger: int,
    admission: int | None,
    epoch: int,
    deadline: float | None,
    now: float,
) -> NewEntry:
    """The row of a parcel."""
    summary, id_ = parcel.summary, parcel.id
    return NewEntry(
        str(id_), buffer, scope, state.value, reason, int(summary.is_urgent), summary.score, ledger, admission,
        parcel.revision, summary.oldest_version, summary.newest_version, summary.num_records, summary.reward,
        summary.source, summary.attempts, epoch, deadline, now, f"{id_.taskset}/{id_.task_key}", summary.advantage,
    )  # fmt: skip


def insert_entries(db: Database, rows: Sequence[NewEntry]) -> dict[str, int]:
    """Write those that are not there; entry → position of each that was written. No two may have one name."""
    (last,) = db.one("SELECT coalesce(max(seq), 0) FROM entries") or (0,)
    db.execute_many(_INSERT, rows)
    return dict(db.all("SELECT entry, seq FROM entries WHERE seq > ?", (last,)))


def without_repeats(puts: Sequence[Put]) -> Iterator[Sequence[Put]]:
    """Parts in which no group is there twice, in order: a repeated put meets what the first one did."""
    if len({put.parcel.id for put in puts}) == len(puts):
        yield puts
        return
    part: dict[object, Put] = {}
    for put in puts:
        if put.parcel.id in part:
            yield list(part.values())
            part = {}
        part[put.parcel.id] = put
    yield list(part.values())
