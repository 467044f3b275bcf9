"""What the store asks of a database: one connection, one transaction at a time, errors in words."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from triune.errors import StoreError

T = TypeVar("T")

Row = tuple[Any, ...]

Parameters = Sequence[Any] | Mapping[str, Any]

TELL_S = 1.0
"""How long a database may be away before somebody who waits for it is told."""

_log = logging.getLogger(__name__)

TOPICS = frozenset({"entries", "slots", "stock", "versions", "runs", "control"})
"""What a transaction may touch; who waits for one of them looks again after it commits."""


class Interrupted(StoreError):
    """The database went away, or stopped the transaction, before it committed: nothing happened, repeat it whole."""


class OutcomeUnknown(StoreError):
    """The database went away during a commit and did not come back to say what became of it: never repeat it."""


class Database(ABC):
    """A connection with what a transaction collects on its way: time, topics touched, counters.

    Statements are portable SQL with `?`, `?1` or `:name` for parameters. A backend gives `execute` and `execute_many`
    (both return a cursor) and says how a transaction begins, commits and is undone.

    Attributes:
        where: The file or server, for messages.
        is_shared: Whether other processes may write to it.
        patience_s: How long `attempt` repeats what was interrupted.
        now: Seconds since 1970 at the start of the current transaction.
        touched: Topics whose waiters must look again after commit.
        verified: (run, epoch) pairs that passed the fence in the current transaction.
        unwritten: (entry's position, revision) → bytes that must be elsewhere than in a row before it commits.
        before_commit: Called at the end of every transaction, inside it.
    """

    execute: Callable[..., Any]
    execute_many: Callable[..., Any]
    patience_s = 0.0

    def __init__(self, where: str, *, is_shared: bool) -> None:
        self.where, self.is_shared = where, is_shared
        self.now = 0.0
        self.touched: set[str] = set()
        self.verified: set[tuple[str, int]] = set()
        self.unwritten: dict[tuple[int, int], bytes] = {}
        self.before_commit: Callable[[], None] = lambda: None
        self._counts: dict[str, int] = {}
        self._looks = False
        self._repairs: list[Callable[[], object]] = []
        self._turn = threading.Lock()
        self._is_patient = True

    def one(self, sql: str, parameters: Parameters = ()) -> Row | None:
        """The first row, or None."""
        return self.execute(sql, parameters).fetchone()

    def all(self, sql: str, parameters: Parameters = ()) -> list[Row]:
        """All rows."""
        return self.execute(sql, parameters).fetchall()

    def each(self, sql: str, rows: Sequence[Parameters]) -> list[Row | None]:
        """The first row that a statement gives for each of these parameters, in order."""
        return [self.one(sql, row) for row in rows]

    def count(self, name: str, by: int = 1) -> None:
        """Add to a durable counter, written once when the transaction commits."""
        self._counts[name] = self._counts.get(name, 0) + by

    def if_undone(self, repair: Callable[[], object]) -> None:
        """Call `repair`, the latest first, should this transaction not commit: for what is remembered beside it."""
        self._repairs.append(repair)

    def counters(self) -> dict[str, int]:
        """Every durable counter as of the last commit."""
        return dict(self.all("SELECT name, value FROM counters"))

    @contextmanager
    def transaction(self, *, looks: bool = False) -> Iterator[None]:
        """All or nothing; a failure inside leaves no trace. Transactions of all processes happen one after another.

        One that only `looks` sees the database as it was at one moment, and where the database can, it neither waits
        for those that write nor they for it. Bytes that are elsewhere may be gone by then: those are for the others.

        Raises:
            StoreError: The database failed (disk full, locked for too long, corrupt).
            Interrupted: It failed in a way that a repetition of the whole transaction may well survive.
            OutcomeUnknown: Nobody can tell whether it was committed.
        """
        with self._turn:
            self._forget()
            self._looks = looks
            try:
                self._begin()
                yield
                self.before_commit()
                self._flush_counters()
                self._commit()
            except BaseException as error:
                for repair in reversed(self._repairs):
                    repair()
                self._forget()
                said = self._undo(error)
                if said is not None:
                    raise said from error
                raise

    def attempt(self, work: Callable[[], T], gives_up: Callable[[], bool] = lambda: False, *, looks: bool = False) -> T:
        """Run `work` in a transaction, and again while it is interrupted, for `patience_s` or until `gives_up`.

        Once patience was at an end, calls are tried only once until one succeeds: who ends because of it ends soon.
        """
        began, pause_s, is_told = time.monotonic(), 0.02, False
        patience_s = self.patience_s if self._is_patient else 0.0
        while True:
            try:
                with self.transaction(looks=looks):
                    done = work()
                self._is_patient = True
                return done
            except OutcomeUnknown:
                self._is_patient = False
                raise
            except Interrupted as error:
                waited = time.monotonic() - began
                if waited > patience_s or gives_up():
                    self._is_patient = False
                    raise
                if waited > TELL_S and not is_told:
                    is_told = True
                    _log.warning("%s: %s; asking again for up to %.0f s", error.where, error.found, patience_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)

    @abstractmethod
    def _begin(self) -> None:
        """Begin to be alone with the data, and set `now`."""

    @abstractmethod
    def _commit(self) -> None:
        """Commit what the transaction did."""

    @abstractmethod
    def _undo(self, error: BaseException) -> StoreError | None:
        """Roll back what an error stopped; the error in our words when it is the driver's."""

    def _flush_counters(self) -> None:
        if self._counts:
            self.execute_many(
                "INSERT INTO counters(name, value) VALUES (?, ?) "
                "ON CONFLICT(name) DO UPDATE SET value = counters.value + excluded.value",
                list(self._counts.items()),
            )

    def _forget(self) -> None:
        self.touched.clear()
        self.verified.clear()
        self.unwritten.clear()
        self._counts.clear()
        self._repairs.clear()

    def listen(self, hear: Callable[[set[str]], None]) -> bool:
        """Tell `hear`, on any thread, what other processes touched; False: this database cannot, so ask it instead."""
        return False

    def foreign_version(self) -> int:
        """A number that changes when another connection commits; only asked where `listen` said False."""
        return 0

    def secure(self) -> None:
        """Have what was committed outlive a power cut, where a commit alone does not; for any thread.

        Raises:
            StoreError: The disk failed.
        """
        return

    @abstractmethod
    def close(self) -> None:
        """Close the connection; what was committed stays. Closing twice changes nothing."""
