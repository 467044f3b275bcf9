"""Consumption: one row per granted use, leased, then acknowledged by a checkpoint or returned (CONTRACTS C3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from triune.buffer.database import Database
from triune.buffer.entries import Entries
from triune.buffer.runs import Incarnation, Runs
from triune.buffer.versions import Versions
from triune.errors import FencedError, StoreError
from triune.failpoints import failpoint
from triune.ports import EntryState, LeaseOrder, Refund


class Grant(NamedTuple):
    """A use that was just granted."""

    seq: int
    entry: str
    revision: int
    use_no: int
    staleness: int


class Order(NamedTuple):
    """What to lease, and in which order.

    Attributes:
        num: How many ordinary entries.
        urgent: How many urgent ones on top of them.
        buffer: Named buffer.
        min_version: Oldest version that may still be trained on.
        max_staleness: The same, counted in published steps on the surviving line; None = not asked.
        ahead: Only entries with at most this many groups admitted before them still open; None = any.
        by: Which of them go first.
        step: Steps that are done; None = not known.
        max_uses: How often what is granted may be used in all.
        again: Only entries that were used before, instead of only new ones.
        cooldown: With `again`: steps that must lie between two uses of one entry.
    """

    num: int
    urgent: int
    buffer: str
    min_version: int
    max_staleness: int | None
    ahead: int | None
    by: LeaseOrder = "priority"
    step: int | None = None
    max_uses: int = 1
    again: bool = False
    cooldown: int = 0


class _Candidate(NamedTuple):
    class_: int
    score: float
    ledger: int
    seq: int
    entry: str
    revision: int
    scope: str
    oldest: int
    max_uses: int
    reward: float | None


_FAR = 1 << 62
_COLUMNS = "class, score, ledger, seq, entry, revision, scope, oldest_version, max_uses, reward"
_BY = {
    "priority": "score DESC, ledger, seq",
    "age": "ledger, seq",
    "newest": "oldest_version DESC, ledger, seq",
    "reward": "reward DESC, ledger, seq",
}
_USES = "(SELECT count(*) FROM uses u WHERE u.entry = e.seq AND u.consumer = :run AND u.state != 'returned')"
_NEW = {True: "granted = 0", False: f"granted = 0 AND {_USES} = 0"}
"""By whether an entry is this run's own: those of all runs count per consumer."""
_AGAIN = {
    True: "granted > 0 AND granted < max_uses",
    False: f"granted = 0 AND max_uses > 1 AND {_USES} BETWEEN 1 AND max_uses - 1",
}
_RESTED = (
    "NOT (oldest_version >= 0 AND oldest_version < :floor) AND NOT EXISTS (SELECT 1 FROM uses u "
    "WHERE u.entry = e.seq AND u.consumer = :run AND u.state != 'returned' AND coalesce(u.step, :now) >= :rested)"
)


class Uses:
    """Lease, acknowledge, return."""

    def __init__(self, db: Database, runs: Runs, entries: Entries, versions: Versions) -> None:
        self.db, self.runs, self.entries, self.versions = db, runs, entries, versions
        self.on_settled: Callable[[Incarnation, int], None] = lambda who, seq: None
        """Called with (who, seq) when no lease of an amended entry is left; set by `Amendments`."""

    # ---- granting

    def lease(self, who: Incarnation, order: Order, is_final: bool) -> tuple[list[Grant] | None, int]:
        """Grant uses; None when fewer than asked are there and more may come (`is_final` False and no `end`).

        With it comes how many over-stale entries were dropped on the way.
        """
        self.runs.check(who)
        self.sweep(who)
        floor = self._floor(who.run, order)
        num_stale = 0 if order.again else self._drop_stale(who, order, floor)
        chosen = self._candidates(who, order, floor)
        num_ordinary = sum(candidate.class_ == 0 for candidate in chosen)
        if num_ordinary < order.num and not (is_final or order.again or self._is_all(who.run)):
            return None, num_stale
        return self._grant(who, chosen, order), num_stale

    def _is_all(self, run: str) -> bool:
        """Whether nothing more can come: the tasks ran out and no explorer is making a group, or the run is over."""
        return self.runs.is_finished(run) or (self.runs.has_ended(run) and self.entries.ledger.is_settled(run))

    def _floor(self, run: str, order: Order) -> int:
        """The oldest version that may still be trained on."""
        if order.max_staleness is None:
            return order.min_version
        return max(order.min_version, self.versions.floor(run, order.max_staleness))

    def _drop_stale(self, who: Incarnation, order: Order, floor: int) -> int:
        """Drop what is too old and was not trained on, wherever it stands in the order: it holds a slot in vain.

        What is open to every run was sampled by versions of another one, which say nothing about age here.
        """
        if floor <= 0:
            return 0
        stale = self.db.all(
            "SELECT seq FROM entries WHERE buffer = ? AND scope = ? AND class = 0 AND state = 'ready' "
            "AND granted = 0 AND oldest_version >= 0 AND oldest_version < ?",
            (order.buffer, who.run, floor),
        )
        for (seq,) in stale:
            self.entries.discard(who.run, seq, EntryState.DROPPED, Refund.STALE.value, Refund.STALE)
        return len(stale)

    def _candidates(self, who: Incarnation, order: Order, floor: int) -> list[_Candidate]:
        """Up to `urgent` urgent entries, then up to `num` others, this run's own and those open to every run."""
        found: list[_Candidate] = []
        horizon, now = self._horizon(who.run, order.ahead), _FAR if order.step is None else order.step + 1
        given = {
            "buffer": order.buffer, "run": who.run, "floor": floor, "now": now, "rested": now - order.cooldown
        }  # fmt: skip
        for class_, limit in ((1, order.urgent), (0, order.num)):
            given |= {"class": class_, "limit": limit, "before": horizon if class_ == 0 else _FAR}
            own, free = (self.db.all(_select(order, is_own), given) for is_own in (True, False))
            merged = [_Candidate(*row) for row in (*own, *free)]
            if own and free:
                merged.sort(key=_SORT[order.by])
            found += merged[:limit]
        return found

    def _horizon(self, run: str, ahead: int | None) -> int:
        """Ledger position of the first open admission that must not be overtaken."""
        if ahead is None:
            return _FAR
        sql = "SELECT seq FROM admissions WHERE run = ? AND state = 'open' ORDER BY seq LIMIT 1 OFFSET ?"
        row = self.db.one(sql, (run, ahead))
        return row[0] if row else _FAR

    def _grant(self, who: Incarnation, chosen: Sequence[_Candidate], order: Order) -> list[Grant]:
        expires, step = self.db.now + self.runs.lease_s, None if order.step is None else order.step + 1
        grants, rows = [], []
        staleness = {oldest: self.versions.staleness(who.run, oldest) for oldest in {c.oldest for c in chosen}}
        for c in chosen:
            use_no = 1 if c.max_uses == 1 else self._next_use(c.seq, who.run)
            grants.append(Grant(c.seq, c.entry, c.revision, use_no, staleness[c.oldest]))
            rows.append((c.seq, c.revision, who.run, use_no, step, who.owner, who.epoch, expires))
        self.db.execute_many(
            "INSERT INTO uses(entry, revision, consumer, use_no, state, step, owner, epoch, expires) "
            "VALUES (?, ?, ?, ?, 'leased', ?, ?, ?, ?)",
            rows,
        )
        if order.max_uses > 1:
            self.db.execute_many(
                "UPDATE entries SET max_uses = max(max_uses, ?) WHERE seq = ?",
                [(order.max_uses, c.seq) for c in chosen if not c.class_],
            )
        self.db.execute_many(
            "UPDATE entries SET granted = granted + 1 WHERE seq = ?", [(c.seq,) for c in chosen if c.scope]
        )
        if rows:
            self.db.count(f"granted/{who.run}", len(rows))
            self.db.touched.add("stock")
        return grants

    def _next_use(self, seq: int, consumer: str) -> int:
        sql = "SELECT use_no FROM uses WHERE entry = ? AND consumer = ? AND state != 'returned'"
        taken = {row[0] for row in self.db.all(sql, (seq, consumer))}
        return next(number for number in range(1, len(taken) + 2) if number not in taken)

    # ---- settling

    def ack(self, who: Incarnation, uses: Sequence[tuple[str, int]], checkpoint: str, step: int) -> None:
        """The checkpoint contains these uses; repeating it changes nothing.

        Raises:
            StoreError: A use was never granted.
            FencedError: A use expired and was granted to somebody else.
        """
        self.runs.check(who)
        settled = []
        for entry, use_no in uses:
            row = self.db.one(
                "UPDATE uses SET state = 'acked', step = coalesce(step, ?), checkpoint = ? "
                "WHERE entry = (SELECT seq FROM entries WHERE entry = ?) AND consumer = ? AND use_no = ? "
                "AND state != 'returned' AND state = 'leased' AND owner = ? RETURNING entry",
                (step, checkpoint, entry, who.run, use_no, who.owner),
            )
            if row is not None:
                self._count_ack(row[0])
                settled.append(row[0])
            else:
                settled += self._ack_slowly(who, entry, use_no, checkpoint, step)
        failpoint("buffer.ack.inside")
        self._settle(who, settled)

    def _ack_slowly(self, who: Incarnation, entry: str, use_no: int, checkpoint: str, step: int) -> list[int]:
        """An acknowledgement that meets no lease of this owner: repeated, late, or of an earlier incarnation."""
        where = f"use {use_no} of {entry!r}"
        seq, _ = self.entries.locate(entry)
        rows = self.db.all(
            "SELECT id, state, owner, epoch FROM uses WHERE entry = ? AND consumer = ? AND use_no = ? ORDER BY id DESC",
            (seq, who.run, use_no),
        )
        if not rows:
            raise StoreError(
                where, "acknowledged, but never granted", "a leased use", "is this the buffer of that checkpoint?"
            )
        active = next((row for row in rows if row[1] != "returned"), None)
        if active is not None and active[1] == "acked":
            return []
        if active is not None and active[2] != who.owner and active[3] == who.epoch:
            raise FencedError(
                where, "its lease expired and another process took it", "a live lease", "raise buffer.lease_s"
            )
        chosen = active or rows[0]
        self.db.execute(
            "UPDATE uses SET state = 'acked', step = coalesce(step, ?), checkpoint = ? WHERE id = ?",
            (step, checkpoint, chosen[0]),
        )
        if active is None:
            self.db.execute("UPDATE entries SET granted = granted + 1 WHERE seq = ? AND scope != ''", (seq,))
        self._count_ack(seq)
        return [seq]

    def _count_ack(self, seq: int) -> None:
        self.db.execute(
            "UPDATE entries SET acked = acked + 1, "
            "state = CASE WHEN acked + 1 >= max_uses AND state = 'ready' THEN 'spent' ELSE state END "
            "WHERE seq = ? AND scope != ''",
            (seq,),
        )

    def give_back(self, who: Incarnation, uses: Sequence[tuple[str, int]] | None, dropped_by: str = "") -> int:
        """Return leases untrained; with None all of this consumer. The number returned.

        `dropped_by`: entries of this run that have no other use are dropped for that reason, and give their slots back.
        """
        self.runs.check(who)
        if uses is None:
            sql = "SELECT id, entry FROM uses WHERE consumer = ? AND state = 'leased'"
            rows = self.db.all(sql, (who.run,))
        else:
            sql = (
                "SELECT id, entry FROM uses WHERE entry = (SELECT seq FROM entries WHERE entry = ?) AND consumer = ? "
                "AND use_no = ? AND state != 'returned' AND state = 'leased'"
            )
            rows = [row for entry, use_no in uses for row in self.db.all(sql, (entry, who.run, use_no))]
        self.take_back(who, rows)
        if dropped_by:
            sql = "SELECT 1 FROM entries WHERE seq = ? AND scope = ? AND granted = 0 AND state = 'ready'"
            for seq in [seq for _, seq in rows if self.db.one(sql, (seq, who.run))]:
                self.entries.discard(who.run, seq, EntryState.DROPPED, dropped_by, Refund.DROPPED)
        return len(rows)

    def take_back(self, who: Incarnation, rows: Sequence[tuple[int, int]]) -> None:
        """Return the uses (id, entry), leased or acknowledged; their entries are ready again."""
        for use, seq in rows:
            was = self.db.one("SELECT state FROM uses WHERE id = ?", (use,))
            acked = int(was is not None and was[0] == "acked")
            self.db.execute("UPDATE uses SET state = 'returned', step = NULL, checkpoint = NULL WHERE id = ?", (use,))
            self.db.execute(
                "UPDATE entries SET granted = granted - 1, acked = acked - ?, "
                "state = CASE WHEN state = 'spent' THEN 'ready' ELSE state END WHERE seq = ? AND scope != ''",
                (acked, seq),
            )
        if rows:
            self._settle(who, [seq for _, seq in rows])
            self.db.touched |= {"entries", "stock"}

    def _settle(self, who: Incarnation, entries: Sequence[int]) -> None:
        deferred = {row[0] for row in self.db.all("SELECT entry FROM amendments WHERE outcome = 'deferred'")}
        for seq in entries:
            if seq in deferred:
                self.on_settled(who, seq)

    def sweep(self, who: Incarnation) -> None:
        """Return leases of others whose heartbeat stopped, and expire what is past its deadline.

        Who calls is alive, however late its beat is: after a suspended machine wakes, its batch is still in its hands.
        """
        late = self.db.all(
            "SELECT id, entry FROM uses WHERE consumer = ? AND state = 'leased' AND expires <= ? AND owner != ?",
            (who.run, self.db.now, who.owner),
        )
        self.take_back(who, late)
        self.entries.expire()


def _select(order: Order, is_own: bool) -> str:
    """The query for this run's own entries, or for those that are open to every run."""
    uses = f"{_AGAIN[is_own]} AND {_RESTED}" if order.again else _NEW[is_own]
    scope = ":run" if is_own else "''"
    return (
        f"SELECT {_COLUMNS} FROM entries e WHERE buffer = :buffer AND scope = {scope} AND class = :class "
        f"AND state = 'ready' AND {uses} AND ledger < :before ORDER BY {_BY[order.by]} LIMIT :limit"
    )


def _age(c: _Candidate) -> tuple[int, int]:
    return (c.ledger, c.seq)


_SORT: dict[str, Callable[[_Candidate], Any]] = {
    "priority": lambda c: (-c.score, *_age(c)),
    "age": _age,
    "newest": lambda c: (-c.oldest, *_age(c)),
    "reward": lambda c: (math.inf if c.reward is None else -c.reward, *_age(c)),
}
"""The orders of `_BY`, for merging."""
