"""Deletes what entries hold, for good: their bytes, people's changes to them, and a note in every export of them.

What is left of an entry is its name and its row, so that every count still adds up and no later put or import brings it
back under its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from triune.buffer.content import REDACTED
from triune.buffer.database import Database
from triune.buffer.deleted import marks_of, remember
from triune.buffer.entry_walk import walk
from triune.buffer.export_notes import Told, tell_exports
from triune.buffer.query import Filter
from triune.buffer.query_columns import group_of
from triune.buffer.segments_gc import Reclaimed, reclaim
from triune.buffer.sqlite import SQLiteDatabase
from triune.buffer.store import Store
from triune.buffer.verify import attempt
from triune.ports import EntryState, Refund
from triune.records import Group, Task, encode_group

_KEPT = (EntryState.SPENT, EntryState.DROPPED, EntryState.EXPIRED, EntryState.EVICTED)
"""States that a deletion leaves: none of these is leased, and a spent entry was trained on whatever happens to it."""


class Deleted(msgspec.Struct, frozen=True, kw_only=True):
    """What a deletion did, or would do.

    Attributes:
        num_entries: Entries whose records are gone.
        states: State they were in → their number.
        sources: Source → their number.
        num_leased: Fit too, but a trainer holds them, or what an amendment made of them: left as they are.
        manifests: Manifest of an export → how many of its entries are gone.
        lost_manifests: Of exports that are no longer where they were written, or cannot be changed.
        unfinished_manifests: Of exports that are being written and note it at their end, or were cut off.
        left_in: File in which the bytes still are, because somebody reads an older state of the store; "" = none.
        examples: Names of the first few.
        segments: What that did to the segments that held their bytes.
    """

    num_entries: int
    states: Mapping[str, int]
    sources: Mapping[str, int]
    num_leased: int
    manifests: Mapping[str, int] = {}
    lost_manifests: tuple[str, ...] = ()
    unfinished_manifests: tuple[str, ...] = ()
    left_in: str = ""
    examples: tuple[str, ...] = ()
    segments: Reclaimed = Reclaimed()


def delete(store: Store, wanted: Filter, *, by: str, is_dry: bool) -> Deleted:
    """Delete what the entries that fit hold; with `is_dry` only say which they are.

    What amendments made of an entry goes with it. What is leased stays, unless the heartbeat of who leased it stopped.
    Entries with uses left become `evicted`, and those that were never used give their slots back. A step that was
    trained on a deleted entry keeps what it learned.

    Raises:
        StoreError: The store failed; what was deleted until then stays deleted.
    """
    if not is_dry:
        _overwrite_what_is_deleted(store.db)
    work = _Deletion(store, is_dry)
    for row, _ in walk(store, wanted):
        work.take(row.seq)
    told = Told() if is_dry else tell_exports(store, by)  # also of what an earlier one had no time to
    return Deleted(
        num_entries=len(work.gone),
        states=dict(Counter(entry.state for entry in work.gone)),
        sources=dict(Counter(entry.source for entry in work.gone)),
        num_leased=work.num_leased,
        manifests=told.manifests,
        lost_manifests=told.lost,
        unfinished_manifests=told.unfinished,
        left_in="" if is_dry else _empty_log(store.db),
        segments=Reclaimed() if is_dry else reclaim(store),  # also what an earlier one left, when it was stopped
        examples=tuple(entry.name for entry in work.gone[:5]),
    )


class _Entry(NamedTuple):
    seq: int
    name: str
    scope: str
    state: str
    reason: str
    source: str


_FAMILY = """
WITH RECURSIVE family(seq) AS (
    SELECT seq FROM entries WHERE seq = ?
    UNION SELECT e.seq FROM family f JOIN amendments a ON a.entry = f.seq JOIN entries e ON e.entry = a.made
    WHERE a.made <> ''
)
SELECT e.seq, e.entry, e.scope, e.state, e.reason, e.source FROM family f JOIN entries e ON e.seq = f.seq
WHERE e.reason <> ? ORDER BY e.seq
"""
"""An entry and what amendments made of it, which holds the same words; those that are deleted already aside."""


class _Deletion:
    """Takes out one entry after the other, each once.

    Attributes:
        gone: What was taken out, or would be.
        num_leased: Entries that fit but stay.
    """

    def __init__(self, store: Store, is_dry: bool) -> None:
        self.store, self.db, self.is_dry = store, store.db, is_dry
        self.gone: list[_Entry] = []
        self.num_leased = 0
        self._seen: set[int] = set()

    def take(self, seq: int) -> None:
        """Delete an entry with all that amendments made of it, unless a trainer holds one of them."""
        family = self.db.attempt(lambda: self._take(seq))
        if family is None:
            self.num_leased += 1
            return
        self.gone += [entry for entry in family if entry.seq not in self._seen]
        self._seen |= {entry.seq for entry in family}

    def _take(self, seq: int) -> list[_Entry] | None:
        family = [_Entry(*row) for row in self.db.all(_FAMILY, (seq, REDACTED))]
        if any(self._is_held(entry.seq) for entry in family):
            return None
        if not self.is_dry:
            for entry in family:
                self._delete(entry)
        return family

    def _is_held(self, seq: int) -> bool:
        """Whether a trainer may have it in its hands; one whose heartbeat stopped has not."""
        sql = "SELECT 1 FROM uses WHERE entry = ? AND state != 'returned' AND state = 'leased' AND expires > ? LIMIT 1"
        return self.db.one(sql, (seq, self.db.now)) is not None

    def _delete(self, entry: _Entry) -> None:
        remember(self.db, self._marks(entry.seq))
        if entry.state in _KEPT:
            self._mark(entry)
        else:
            self._return_leases(entry.seq)
            sql = "SELECT 1 FROM uses WHERE entry = ? AND state != 'returned' LIMIT 1"
            refund = None if self.db.one(sql, (entry.seq,)) is not None else Refund.DROPPED
            run = entry.scope or group_of(entry.name).run
            self.store.entries.discard(run, entry.seq, EntryState.EVICTED, REDACTED, refund)
        self.store.blobs.forget(entry.seq)
        self.db.execute("UPDATE revisions SET blob = ?, is_whole = 1 WHERE entry = ?", (_stub(entry.name), entry.seq))
        self.db.execute("DELETE FROM contents WHERE entry = ?", (entry.seq,))
        self.db.execute(
            "UPDATE amendments SET patch = ?, outcome = CASE WHEN outcome = 'deferred' THEN 'expired' ELSE outcome END "
            "WHERE entry = ?",
            (msgspec.msgpack.encode({}), entry.seq),
        )

    def _marks(self, seq: int) -> set[str]:
        """Of its first and newest revision; none of what is damaged or was evicted."""
        read = self.store.entries.read
        found = [attempt(lambda revision=revision: marks_of(read(seq, revision)), "blobs") for revision in (0, None)]
        return {mark for marks in found if isinstance(marks, set) for mark in marks}

    def _mark(self, entry: _Entry) -> None:
        self.db.execute("UPDATE entries SET reason = ?, deadline = NULL WHERE seq = ?", (REDACTED, entry.seq))
        if entry.state == EntryState.EVICTED:
            self.db.count(f"evicted/{entry.reason}", -1)
            self.db.count(f"evicted/{REDACTED}")

    def _return_leases(self, seq: int) -> None:
        """Of processes whose heartbeat stopped. A checkpoint that contains such a use still acknowledges it."""
        rows = self.db.all(
            "UPDATE uses SET state = 'returned', step = NULL, checkpoint = NULL WHERE entry = ? "
            "AND state != 'returned' AND state = 'leased' RETURNING id",
            (seq,),
        )
        sql = "UPDATE entries SET granted = granted - ? WHERE seq = ? AND scope != ''"
        self.db.execute(sql, (len(rows), seq))


def _stub(name: str) -> bytes:
    id_ = group_of(name)
    return encode_group(
        Group(id=id_, task=Task(key=id_.task_key, taskset=id_.taskset), records=(), info={REDACTED: True})
    )


def _overwrite_what_is_deleted(db: Database) -> None:
    """SQLite keeps deleted bytes in its file until something else needs the place, unless it is told not to."""
    if isinstance(db, SQLiteDatabase):
        db.execute("PRAGMA secure_delete = ON")


def _empty_log(db: Database) -> str:
    """Move what the write-ahead log holds into the file, so that old pages are not left in it.

    The log's name where somebody who reads still needs its old pages; "" = it is empty.
    """
    if not isinstance(db, SQLiteDatabase):
        return ""
    row = db.one("PRAGMA wal_checkpoint(TRUNCATE)")
    return f"{db.where}-wal" if row is not None and row[0] else ""
