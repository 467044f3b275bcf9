"""One SQLite connection, one transaction at a time, and SQLite's errors in words."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from triune.buffer.schema import prepare_schema
from triune.errors import StoreError

Row = tuple[Any, ...]

Parameters = Sequence[Any] | Mapping[str, Any]

SYNCHRONOUS = ("off", "normal", "full")


class Database:
    """A connection with what a transaction collects on its way: time, topics touched, counters.

    Attributes:
        where: The file, for messages; `:memory:` for none.
        is_shared: Whether other processes may write to it.
        now: Seconds since 1970 at the start of the current transaction.
        touched: Topics (`entries`, `slots`, `stock`, `versions`, `runs`, `control`) whose waiters must look
            again after commit.
        verified: (run, epoch) pairs that passed the fence in the current transaction.
    """

    def __init__(self, connection: sqlite3.Connection, where: str, clock: Callable[[], float] = time.time) -> None:
        self.connection, self.where, self.clock = connection, where, clock
        self.is_shared = where != ":memory:"
        self.now = clock()
        self.touched: set[str] = set()
        self.verified: set[tuple[str, int]] = set()
        self._counts: dict[str, int] = {}
        self._turn = threading.Lock()
        self.execute = connection.execute
        self.execute_many = connection.executemany

    def one(self, sql: str, parameters: Parameters = ()) -> Row | None:
        """The first row, or None."""
        return self.execute(sql, parameters).fetchone()

    def all(self, sql: str, parameters: Parameters = ()) -> list[Row]:
        """All rows."""
        return self.execute(sql, parameters).fetchall()

    def count(self, name: str, by: int = 1) -> None:
        """Add to a durable counter, written once when the transaction commits."""
        self._counts[name] = self._counts.get(name, 0) + by

    def counters(self) -> dict[str, int]:
        """Every durable counter as of the last commit."""
        return dict(self.all("SELECT name, value FROM counters"))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing; a failure inside leaves no trace.

        Raises:
            StoreError: SQLite failed (disk full, locked for too long, corrupt).
        """
        with self._turn:
            self.now = self.clock()
            self._forget()
            try:
                self.execute("BEGIN IMMEDIATE")
                yield
                self._flush_counters()
                self.execute("COMMIT")
            except BaseException as error:
                self._roll_back()
                if isinstance(error, sqlite3.Error):
                    raise store_error(error, self.where) from error
                raise

    def _flush_counters(self) -> None:
        if self._counts:
            self.execute_many(
                "INSERT INTO counters(name, value) VALUES (?, ?) "
                "ON CONFLICT(name) DO UPDATE SET value = value + excluded.value",
                list(self._counts.items()),
            )

    def _roll_back(self) -> None:
        self._forget()
        if self.connection.in_transaction:
            try:
                self.execute("ROLLBACK")
            except sqlite3.Error as error:
                raise store_error(error, self.where) from error

    def _forget(self) -> None:
        self.touched.clear()
        self.verified.clear()
        self._counts.clear()

    def foreign_version(self) -> int:
        """A number that changes when another connection commits."""
        row = self.one("PRAGMA data_version")
        return row[0] if row else 0

    def close(self) -> None:
        """Close the connection; what was committed stays."""
        self.connection.close()


def open_database(
    path: str | Path,
    *,
    synchronous: str = "normal",
    busy_timeout_s: float = 30.0,
    clock: Callable[[], float] = time.time,
) -> Database:
    """Open a database file (made when missing; `:memory:` for none) and bring its schema up.

    Raises:
        StoreError: Its folder is missing, it is no database of ours, or of a newer Triune.
    """
    where = str(path)
    if where != ":memory:" and not Path(where).parent.is_dir():
        raise StoreError(
            where, "its folder does not exist", "", f"make {Path(where).parent} or change buffer.store.path"
        )
    try:
        connection = sqlite3.connect(
            where, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False, cached_statements=256
        )
        connection.execute("PRAGMA page_size = 8192")  # a group is a few KiB; this halves the pages of a commit
        if where != ":memory:":
            _use_wal(connection, busy_timeout_s)
        connection.execute(f"PRAGMA synchronous = {SYNCHRONOUS.index(synchronous)}")
        connection.execute("PRAGMA wal_autocheckpoint = 4000")
        prepare_schema(connection, where)
    except sqlite3.Error as error:
        raise store_error(error, where) from error
    return Database(connection, where, clock)


def _use_wal(connection: sqlite3.Connection, timeout_s: float) -> None:
    """Switch to write-ahead logging; the switch itself ignores the busy timeout, so it is tried again."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


_MEANINGS: dict[int, tuple[str, str]] = {
    sqlite3.SQLITE_FULL: ("the disk is full", "free space and resume; what was committed is kept"),
    sqlite3.SQLITE_BUSY: (
        "locked for too long",
        "find the process that holds it, or raise buffer.store.busy_timeout_s",
    ),
    sqlite3.SQLITE_LOCKED: ("locked for too long", "find the connection that holds it"),
    sqlite3.SQLITE_CORRUPT: ("the database is damaged", "keep a copy, then salvage it with `sqlite3 FILE .recover`"),
    sqlite3.SQLITE_NOTADB: ("not a database", "name another file in buffer.store.path"),
    sqlite3.SQLITE_CANTOPEN: ("cannot be opened", "check that its folder exists and may be written"),
    sqlite3.SQLITE_READONLY: ("may not be written", "change its permissions or buffer.store.path"),
    sqlite3.SQLITE_IOERR: ("the disk failed", "check the disk and its quota, then resume; what was committed is kept"),
    sqlite3.SQLITE_PERM: ("may not be opened", "change its permissions"),
}


def store_error(error: sqlite3.Error, where: str) -> StoreError:
    """SQLite's error as one of ours, in four parts."""
    code = getattr(error, "sqlite_errorcode", None)
    found, do = _MEANINGS.get((code or 0) & 0xFF, (f"{type(error).__name__}", "resume; what was committed is kept"))
    return StoreError(where, f"{found} ({error})", "a writable SQLite database", do)
