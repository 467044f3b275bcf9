"""The database in one file, or in none: SQLite, and its errors in words."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from triune.buffer.database import Database
from triune.buffer.schema import bring_up, is_brought_up
from triune.errors import StoreError

SYNCHRONOUS = ("off", "normal", "full")


class SQLiteDatabase(Database):
    """One connection; `where` is the file, `:memory:` for none."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        where: str,
        clock: Callable[[], float] = time.time,
        *,
        synchronous: str = "normal",
    ) -> None:
        super().__init__(where, is_shared=where != ":memory:")
        self.connection, self.clock, self._synchronous = connection, clock, synchronous
        self.now = clock()
        self.execute = connection.execute
        self.execute_many = connection.executemany

    def _begin(self) -> None:
        self.now = self.clock()
        self.execute("BEGIN" if self._looks else "BEGIN IMMEDIATE")

    def _commit(self) -> None:
        self.execute("COMMIT")

    def _undo(self, error: BaseException) -> StoreError | None:
        if self.connection.in_transaction:
            try:
                self.execute("ROLLBACK")
            except sqlite3.Error as worse:
                return store_error(worse, self.where)
        return store_error(error, self.where) if isinstance(error, sqlite3.Error) else None

    def foreign_version(self) -> int:
        """A number that changes when another connection commits."""
        row = self.one("PRAGMA data_version")
        return row[0] if row else 0

    def secure(self) -> None:
        """Flush the write-ahead log, which `synchronous: normal` leaves to the system; with `off` nobody wants it."""
        if not self.is_shared or self._synchronous != "normal":
            return
        try:
            _flush(f"{self.where}-wal")
        except FileNotFoundError:
            return  # everything is in the database file, and was flushed on its way there
        except OSError as error:
            raise StoreError(
                self.where, f"its log cannot be flushed ({error})", "a disk that writes", "check it, then resume"
            ) from error

    def close(self) -> None:
        """Close the connection; what was committed stays."""
        self.connection.close()


def open_database(
    path: str | Path,
    *,
    synchronous: str = "normal",
    busy_timeout_s: float = 30.0,
    clock: Callable[[], float] = time.time,
) -> SQLiteDatabase:
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
        db = SQLiteDatabase(connection, where, clock, synchronous=synchronous)
        for looks in (True, False):  # who opens a store that is new enough does not wait for those that write
            with db.transaction(looks=looks):
                tables = {name for (name,) in db.all("SELECT name FROM sqlite_master WHERE type = 'table'")}
                if looks and is_brought_up(db.execute, tables, where):
                    break
                if not looks:
                    bring_up(db.execute, tables, where)
    except sqlite3.Error as error:
        raise store_error(error, where) from error
    return db


def _flush(path: str) -> None:
    """To the disk, with the folder's entry. The log carries none of SQLite's locks, so it may be opened and closed."""
    for each, flags in ((path, os.O_RDWR), (str(Path(path).parent), os.O_RDONLY)):
        handle = os.open(each, flags)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


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
