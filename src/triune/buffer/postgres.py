"""The database on a PostgreSQL server, for several machines and many writers."""

from __future__ import annotations

import contextlib
import hashlib
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import psycopg
from psycopg.abc import Buffer
from psycopg.adapt import Dumper
from psycopg.conninfo import conninfo_to_dict
from psycopg.types.numeric import Int8BinaryDumper, NumericBinaryLoader
from psycopg.types.string import StrBinaryDumper

from triune.buffer.database import Database, Interrupted, OutcomeUnknown, Parameters
from triune.buffer.postgres_errors import cannot_connect, is_returning, store_error
from triune.buffer.postgres_news import Hear, News
from triune.buffer.postgres_sql import nulls_of, quoted, translate, translate_types
from triune.buffer.schema import bring_up
from triune.errors import StoreError

Connection = psycopg.Connection[Any]

_DEFAULTS = {
    "application_name": "triune",
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}
"""A server whose machine is gone is noticed within half a minute; what the URL says goes first."""

_WRITERS = """
CREATE TABLE IF NOT EXISTS writers (
    writer  TEXT PRIMARY KEY, commits BIGINT NOT NULL, at TIMESTAMPTZ NOT NULL DEFAULT now()
)
"""
"""How many transactions each open buffer committed: what tells, after a break, whether the last one was."""

_HAS_LZ4 = "SELECT 1 FROM pg_settings WHERE name = 'default_toast_compression' AND 'lz4' = ANY(enumvals)"
"""The server's own compression costs more than all else that a put does; lz4 costs next to nothing."""


class PostgresDatabase(Database):
    """One connection, made again when it breaks, and one schema.

    Every transaction begins by waiting for the schema's advisory lock, so that transactions of all processes happen
    one after another, as in SQLite: no admission, lease or fence depends on a snapshot that is not the newest.
    """

    def __init__(
        self,
        url: str,
        schema: str,
        *,
        busy_timeout_s: float = 30.0,
        patience_s: float = 60.0,
        clock: Callable[[], float] | None = None,
        makes: bool = True,
    ) -> None:
        """Connect and bring the schema up.

        Args:
            url: What libpq understands; "" = its environment variables.
            schema: Where the tables are; made when missing.
            busy_timeout_s: How long to wait for another process's transaction. Who holds one for half as long without
                a statement is stopped by the server.
            patience_s: How long to look for a server that is gone.
            clock: None = the server's, on which all machines agree.
            makes: Make the schema where there is none.

        Raises:
            StoreError: The server refuses or does not answer; the schema is of something else or a newer Triune, or is
                not there and not to be made.
        """
        super().__init__(f"PostgreSQL schema {schema!r}", is_shared=True)
        self.schema, self.clock, self.patience_s = schema, clock, patience_s
        self.execute, self.execute_many = self._execute, self._execute_many
        self._url, self._busy_s = url, busy_timeout_s
        self._writer = uuid.uuid4().hex
        self._key = int.from_bytes(hashlib.sha256(f"triune:{schema}".encode()).digest()[:8], "big", signed=True)
        self._channel = f"triune_{self._key & (1 << 64) - 1:x}"
        self._makes = makes
        self._num_commits, self._writes = 0, False
        self._news: News | None = None
        self._line = self._arrive()
        self.where = f"{_address(self._line)}, schema {schema!r}"
        try:
            self.attempt(self._prepare)
        except BaseException:
            self.close()
            raise

    def _arrive(self) -> Connection:
        """The first connection: a server that recovers is waited for, one that is not there may be a wrong address."""
        deadline = time.monotonic() + self.patience_s
        while True:
            try:
                return self._connect()
            except Interrupted as error:
                if not is_returning(error) or time.monotonic() > deadline:
                    raise
            time.sleep(0.2)

    def _connect(self) -> Connection:
        """A new connection, set up.

        Raises:
            StoreError: The server refuses.
            Interrupted: It is not there.
        """
        try:
            given = conninfo_to_dict(self._url)
        except psycopg.ProgrammingError as error:
            raise StoreError(
                "buffer.store.url", f"not understood ({error})", "postgresql://USER@HOST/DATABASE"
            ) from error
        try:
            line = psycopg.connect(
                **{**_DEFAULTS, **given}, autocommit=True, cursor_factory=psycopg.RawCursor, prepare_threshold=2
            )
        except psycopg.Error as error:
            raise cannot_connect(error, self.where) from error
        line.prepared_max = 500
        for dumper, kind in ((_BoolDumper, bool), (Int8BinaryDumper, int), (StrBinaryDumper, str)):
            line.adapters.register_dumper(kind, dumper)
        line.adapters.register_loader("numeric", _NumberLoader)
        try:
            line.execute(
                f"SET search_path TO {quoted(self.schema)}; SET client_encoding TO 'UTF8'; "
                f"SET enable_sort TO off; "  # before it has statistics it sorts a million rows where an index has them
                f"SET jit TO off; "  # what is sorted all the same looks dear, and was compiled for longer than it ran
                f"SET client_min_messages TO warning; SET lock_timeout TO {int(1000 * self._busy_s)}; "
                f"SET idle_in_transaction_session_timeout TO {int(500 * self._busy_s)}".encode()
            )
        except psycopg.Error as error:
            line.close()
            raise store_error(error, self.where, is_gone=True) from error
        return line

    def _prepare(self) -> None:
        """Make or bring up the tables; call it inside a transaction."""
        if self.one("SELECT 1 FROM pg_namespace WHERE nspname = ?", (self.schema,)) is None:
            if not self._makes:
                there = self.all("SELECT schemaname FROM pg_tables WHERE tablename = 'schema_version' ORDER BY 1")
                known = ", ".join(name for (name,) in there) or "none is there"
                raise StoreError(self.where, "no such schema", f"a buffer's ({known})", "correct `?schema=`")
            self.execute(f"CREATE SCHEMA {quoted(self.schema)}")  # needs a right that using it does not need
        rows = self.all("SELECT tablename FROM pg_tables WHERE schemaname = ?", (self.schema,))
        bring_up(lambda sql: self.execute(translate_types(sql)), {name for (name,) in rows}, self.where)
        if not rows and self.one(_HAS_LZ4) is not None:
            self.execute("ALTER TABLE revisions ALTER COLUMN blob SET COMPRESSION lz4")
        self.execute(_WRITERS)
        self.execute("DELETE FROM writers WHERE at < now() - interval '30 days'")

    # ---- statements

    def _execute(self, sql: str, parameters: Parameters = ()) -> psycopg.Cursor[Any]:
        statement = translate(sql, nulls_of(parameters))
        self._writes |= statement.writes
        return self._line.execute(statement.text.encode(), statement.pick(parameters), binary=True)

    def _execute_many(self, sql: str, rows: Sequence[Parameters]) -> psycopg.Cursor[Any]:
        statement = translate(sql)
        self._writes |= statement.writes
        cursor = self._line.cursor()
        cursor.executemany(statement.text.encode(), [statement.pick(row) for row in rows])
        return cursor

    def each(self, sql: str, rows: Sequence[Parameters]) -> list[tuple[Any, ...] | None]:
        """The first row that a statement gives for each of these parameters, in order; one round trip for all."""
        if len(rows) < 2:
            return super().each(sql, rows)
        statement = translate(sql)
        self._writes |= statement.writes
        cursor = self._line.cursor()
        cursor.executemany(statement.text.encode(), [statement.pick(row) for row in rows], returning=True)
        found = [cursor.fetchone()]
        while cursor.nextset():
            found.append(cursor.fetchone())
        return found

    def _script(self, script: str) -> psycopg.Cursor[Any]:
        """Several statements in one round trip; the cursor stands at the last."""
        cursor = self._line.execute(script.encode())
        while cursor.nextset():
            pass
        return cursor

    # ---- transactions

    def _begin(self) -> None:
        if self._line.closed:
            self._line = self._connect()
        self._writes = False
        row = self._script(
            f"BEGIN ISOLATION LEVEL READ COMMITTED; SELECT pg_advisory_xact_lock({self._key}); "
            "SELECT extract(epoch FROM clock_timestamp())::float8"
        ).fetchone()
        assert row is not None, "it is one row"
        self.now = float(row[0]) if self.clock is None else self.clock()

    def _commit(self) -> None:
        """Commit, and say in the same round trip what was touched; a break in between is cleared up."""
        if not (self._writes or self.touched):
            self._script("COMMIT")
            return
        self._num_commits += 1  # also where nobody can tell what became of the last one
        number = self._num_commits
        news = " ".join((self._writer, *sorted(self.touched)))
        tell = f"SELECT pg_notify('{self._channel}', '{news}'); " if self.touched else ""
        try:
            last = self._script(
                f"INSERT INTO writers(writer, commits) VALUES ('{self._writer}', {number}) "
                f"ON CONFLICT(writer) DO UPDATE SET commits = {number}, at = now(); {tell}COMMIT"
            )
        except psycopg.Error as error:
            if not self._is_gone(error):
                raise
            if not self._was_committed(number):
                raise store_error(error, self.where, is_gone=True) from error
        else:
            if last.statusmessage != "COMMIT":
                raise StoreError(
                    self.where, "a transaction that had failed was committed", "one that had not", "report this"
                )

    def _was_committed(self, number: int) -> bool:
        """After a break: whether the transaction is there. Waits until its old connection has ended either way.

        Raises:
            OutcomeUnknown: The server stays away for `patience_s`, or lets nobody in.
        """
        deadline = time.monotonic() + self.patience_s
        while True:
            try:
                self._line.close()
                self._line = self._connect()
                self._script(f"BEGIN; SELECT pg_advisory_xact_lock({self._key})")
                row = self.one("SELECT commits FROM writers WHERE writer = ?", (self._writer,))
                self._script("COMMIT")
                return row is not None and row[0] == number
            except (psycopg.Error, StoreError) as error:
                is_refused = isinstance(error, StoreError) and not isinstance(error, Interrupted)
                if is_refused or time.monotonic() > deadline:
                    raise OutcomeUnknown(
                        self.where,
                        f"the connection broke during a commit, and nobody answers since ({error})",
                        "an answer whether it is there",
                        "start the server and resume, which takes back what nobody holds",
                    ) from error
            time.sleep(0.1)

    def _undo(self, error: BaseException) -> StoreError | None:
        is_gone = isinstance(error, psycopg.Error) and self._is_gone(error)
        if is_gone:
            self._line.close()
        elif not self._line.closed and self._line.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            try:
                self._line.execute(b"ROLLBACK")
            except psycopg.Error:
                self._line.close()  # the server rolls back what has no connection
        return store_error(error, self.where, is_gone=is_gone) if isinstance(error, psycopg.Error) else None

    def _is_gone(self, error: psycopg.Error) -> bool:
        return self._line.closed or self._line.broken or (error.sqlstate or "").startswith(("08", "57P", "25P03"))

    # ---- beside transactions

    def listen(self, hear: Hear) -> bool:
        """Tell `hear`, on a thread of its own, what other processes touched."""
        try:
            self._news = News(self._connect, self._channel, self._writer, hear)
        except psycopg.Error as error:
            raise store_error(error, self.where, is_gone=True) from error
        return True

    def close(self) -> None:
        """Close the connections; what was committed stays."""
        if self._news is not None:
            self._news.stop()
        if not self._line.closed:
            with contextlib.suppress(psycopg.Error):
                self._script(f"DELETE FROM writers WHERE writer = '{self._writer}'")
            self._line.close()


def _address(line: Connection) -> str:
    """The server and database without the password."""
    return f"postgresql://{line.info.user}@{line.info.host}:{line.info.port}/{line.info.dbname}"


class _BoolDumper(Dumper):
    """Flags are integers in the store."""

    oid = psycopg.adapters.types["int8"].oid

    def dump(self, obj: bool) -> Buffer:
        return b"1" if obj else b"0"


class _NumberLoader(NumericBinaryLoader):
    """Sums of integers are integers."""

    def load(self, data: Buffer) -> Any:
        number = super().load(data)
        return int(number) if number == number.to_integral_value() else float(number)
