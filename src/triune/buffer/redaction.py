"""Deletes what entries hold, for good: their bytes, people's changes to them, and a note in every export of them.

What is left of an entry is its name and its row, so that every count still adds up and no later put or import brings it
back under its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec

from triune.buffer.content import REDACTED
from triune.buffer.database import Database
from triune.buffer.entry_walk import walk
from triune.buffer.manifest import note_redaction
from triune.buffer.query import Filter
from triune.buffer.query_columns import EntryRow
from triune.buffer.segments_gc import Reclaimed, reclaim
from triune.buffer.sqlite import SQLiteDatabase
from triune.buffer.store import Store
from triune.errors import StoreError
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
        num_leased: Fit too, but a trainer holds them: left as they are.
        manifests: Manifest of an export → how many of its entries are gone.
        lost_manifests: Of exports that are no longer where they were written, or cannot be changed.
        examples: Names of the first few.
        segments: What that did to the segments that held their bytes.
    """

    num_entries: int
    states: Mapping[str, int]
    sources: Mapping[str, int]
    num_leased: int
    manifests: Mapping[str, int] = {}
    lost_manifests: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()
    segments: Reclaimed = Reclaimed()


def delete(store: Store, wanted: Filter, *, by: str, is_dry: bool) -> Deleted:
    """Delete what the entries that fit hold; with `is_dry` only say which they are.

    What is leased stays. Never used entries become `evicted` and give their slots back. A step that was trained on a
    deleted entry keeps what it learned.

    Raises:
        StoreError: The store failed; what was deleted until then stays deleted.
    """
    states: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    gone: list[str] = []
    num_leased = 0
    if not is_dry:
        _overwrite_what_is_deleted(store.db)
    for row, _ in walk(store, wanted):
        if row.reason == REDACTED:
            continue
        if row.leased or not (is_dry or _delete_one(store, row)):
            num_leased += 1
            continue
        gone.append(row.entry)
        states[row.state] += 1
        sources[row.source] += 1
    touched, lost = ({}, ()) if is_dry else _tell_exports(store, gone, by)
    if gone and not is_dry:
        _empty_log(store.db)
    segments = Reclaimed() if is_dry else reclaim(store)  # also what an earlier deletion left, when it was stopped
    return Deleted(
        num_entries=len(gone), states=dict(states), sources=dict(sources), num_leased=num_leased,
        manifests=touched, lost_manifests=lost, examples=tuple(gone[:5]), segments=segments,
    )  # fmt: skip


def _delete_one(store: Store, row: EntryRow) -> bool:
    """Delete one entry's records in a transaction of its own; False when it was leased in the meantime."""
    id_, db = row.group, store.db
    stub = encode_group(
        Group(id=id_, task=Task(key=id_.task_key, taskset=id_.taskset), records=(), info={REDACTED: True})
    )
    with db.transaction():
        if db.one("SELECT 1 FROM uses WHERE entry = ? AND state = 'leased' LIMIT 1", (row.seq,)) is not None:
            return False
        found = db.one("SELECT state FROM entries WHERE seq = ?", (row.seq,))
        assert found is not None, "rows of entries are never deleted"
        if found[0] in _KEPT:
            db.execute("UPDATE entries SET reason = ?, deadline = NULL WHERE seq = ?", (REDACTED, row.seq))
        else:
            store.entries.discard(row.scope, row.seq, EntryState.EVICTED, REDACTED, Refund.DROPPED)
        store.blobs.forget(row.seq)
        db.execute("UPDATE revisions SET blob = ?, is_whole = 1 WHERE entry = ?", (stub, row.seq))
        db.execute("DELETE FROM contents WHERE entry = ?", (row.seq,))
        db.execute("UPDATE amendments SET patch = ? WHERE entry = ?", (msgspec.msgpack.encode({}), row.seq))
    return True


def _tell_exports(store: Store, gone: list[str], by: str) -> tuple[dict[str, int], tuple[str, ...]]:
    """Note the deletion in the manifest of every export of this store."""
    touched: dict[str, int] = {}
    lost: list[str] = []
    with store.db.transaction():
        manifests = [name for (name,) in store.db.all("SELECT manifest FROM exports ORDER BY manifest")]
    for name in manifests if gone else ():
        try:
            number = note_redaction(Path(name), gone, by) if Path(name).is_file() else None
        except StoreError:
            number = None
        if number is None:
            lost.append(name)
        elif number:
            touched[name] = number
    return touched, tuple(lost)


def _overwrite_what_is_deleted(db: Database) -> None:
    """SQLite keeps deleted bytes in its file until something else needs the place, unless it is told not to."""
    if isinstance(db, SQLiteDatabase):
        db.execute("PRAGMA secure_delete = ON")


def _empty_log(db: Database) -> None:
    """Move what the write-ahead log holds into the file, so that old pages are not left in it."""
    if isinstance(db, SQLiteDatabase):
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
