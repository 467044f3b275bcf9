"""Walks over the entries that fit a filter, a page at a time: neither memory nor the write lock is held long."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial

from triune.buffer.database import Database
from triune.buffer.query import Filter
from triune.buffer.query_columns import SELECTED, EntryRow, make_row
from triune.buffer.store import Store
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
        Damaged: Its bytes are not those that were stored; names the entry.
    """
    if row.state == EntryState.EVICTED:
        id_ = row.group
        return Group(id=id_, task=Task(key=id_.task_key, taskset=id_.taskset), records=())
    return store.entries.read(row.seq, revision)


def walk(
    store: Store, wanted: Filter, *, reads: bool = False, newest_first: bool = False, limit: int | None = None
) -> Iterator[tuple[EntryRow, Group | None]]:
    """Every entry that fits, or the first `limit`, in the order of arrival or backwards; records come where `reads`.

    Records are read of those entries only whose row leaves the filter open. Entries that arrive behind the position on
    the way are met too.
    """
    after: int | None = None
    while limit is None or limit > 0:
        num = PAGE if limit is None or not wanted.is_exact else min(PAGE, limit)
        read = partial(_read_page, store, wanted, after, newest_first, num, limit, reads)
        rows, page = store.db.attempt(read, looks=wanted.is_exact and not reads)
        yield from page
        if len(rows) < num:
            return
        limit, after = None if limit is None else limit - len(page), rows[-1].seq


def _read_page(
    store: Store, wanted: Filter, after: int | None, newest_first: bool, num: int, limit: int | None, reads: bool
) -> tuple[list[EntryRow], list[tuple[EntryRow, Group | None]]]:
    rows = rows_that_fit(store.db, wanted, after=after, newest_first=newest_first, num=num)
    return rows, list(itertools.islice(_checked(store, wanted, rows, reads), limit))


def _checked(
    store: Store, wanted: Filter, rows: Sequence[EntryRow], reads: bool
) -> Iterator[tuple[EntryRow, Group | None]]:
    for row in rows:
        answer = True if wanted.is_exact else wanted.decide(row)
        if answer is False:
            continue
        group = read_entry(store, row) if reads or answer is None else None
        if answer or wanted.fits(row, group):
            yield row, group


def count_that_fit(store: Store, wanted: Filter) -> int:
    """How many entries fit; counted by the database where it can."""
    if not wanted.is_exact:
        return sum(1 for _ in walk(store, wanted))
    condition, parameters = wanted.where()
    sql = f"SELECT count(*) FROM entries e WHERE {condition}"
    row = store.db.attempt(lambda: store.db.one(sql, {**parameters, "now": store.db.now}), looks=True)
    return row[0] if row else 0


def walk_groups(store: Store, wanted: Filter) -> Iterator[tuple[EntryRow, Group]]:
    """`walk` with the records of each."""
    for row, group in walk(store, wanted, reads=True):
        assert group is not None, "it was asked to read them"
        yield row, group
