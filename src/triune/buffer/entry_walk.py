"""Walks over the entries that fit a filter, a page at a time: neither memory nor the write lock is held long."""

from __future__ import annotations

from collections.abc import Iterator

from triune.buffer.database import Database
from triune.buffer.query import Filter
from triune.buffer.query_columns import SELECTED, EntryRow, make_row
from triune.buffer.store import Store
from triune.errors import RecordError, StoreError
from triune.ports import EntryState
from triune.records import Group, Task

PAGE = 256
"""Entries read in one transaction."""


def rows_that_fit(
    db: Database, wanted: Filter, *, after: int | None = None, newest_first: bool = False, num: int | None = None
) -> list[EntryRow]:
    """Up to `num` rows (a page) beyond the position `after`; those of a filter that is not exact may still not fit.

    Call it inside a transaction.
    """
    condition, parameters = wanted.where()
    if after is not None:
        condition = f"({condition}) AND e.seq {'<' if newest_first else '>'} :after"
    order = "e.seq DESC" if newest_first else "e.seq"
    sql = f"SELECT {SELECTED} FROM entries e WHERE {condition} ORDER BY {order} LIMIT :num"
    given = {**parameters, "now": db.now, "num": PAGE if num is None else num}
    return [make_row(values) for values in db.all(sql, given if after is None else {**given, "after": after})]


def read_entry(store: Store, row: EntryRow, revision: int | None = None) -> Group:
    """The records of a row's entry, its newest revision by default, none where they were evicted or deleted.

    Call it inside a transaction.

    Raises:
        StoreError: Its bytes are damaged; names the entry.
    """
    if row.state == EntryState.EVICTED:
        id_ = row.group
        return Group(id=id_, task=Task(key=id_.task_key, taskset=id_.taskset), records=())
    try:
        return store.entries.read(row.seq, revision)
    except RecordError as error:
        raise StoreError(
            f"entry {row.entry!r}",
            f"it cannot be read ({error.found})",
            "the bytes that were stored",
            "look for all damage with `triune buffer verify`, then take it out with `triune buffer gc`",
        ) from error


def walk(
    store: Store, wanted: Filter, *, reads: bool = False, newest_first: bool = False
) -> Iterator[tuple[EntryRow, Group | None]]:
    """Every entry that fits, in the order of arrival or backwards; with its newest records where `reads`.

    Entries that arrive behind the position on the way are met too.
    """
    after: int | None = None
    while True:
        page: list[tuple[EntryRow, Group | None]] = []
        with store.db.transaction():
            rows = rows_that_fit(store.db, wanted, after=after, newest_first=newest_first)
            for row in rows:
                group = read_entry(store, row) if reads or wanted.reads_records else None
                if wanted.is_exact or wanted.fits(row, group):
                    page.append((row, group))
        yield from page
        if len(rows) < PAGE:
            return
        after = rows[-1].seq


def walk_groups(store: Store, wanted: Filter) -> Iterator[tuple[EntryRow, Group]]:
    """`walk` with the records of each."""
    for row, group in walk(store, wanted, reads=True):
        assert group is not None, "it was asked to read them"
        yield row, group
