"""Consumption: one row per granted use, leased, then acknowledged by a checkpoint or returned (CONTRACTS C3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from triune.buffer.choosing import Choosing, Found, Order
from triune.buffer.content import REDACTED
from triune.buffer.database import Database
from triune.buffer.entries import Entries
from triune.buffer.runs import Incarnation, Runs
from triune.buffer.versions import Versions
from triune.errors import FencedError, StoreError
from triune.failpoints import failpoint
from triune.ports import EntryState, Refund


class Grant(NamedTuple):
    """A use that was just granted."""

    seq: int
    entry: str
    revision: int
    use_no: int
    staleness: int
    is_urgent: bool


class Uses:
    """Lease, acknowledge, return."""

    def __init__(
        self, db: Database, runs: Runs, entries: Entries, versions: Versions, choosing: Choosing | None = None
    ) -> None:
        self.db, self.runs, self.entries, self.versions = db, runs, entries, versions
        self.choosing = choosing or Choosing(db, versions)
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
        chosen = self.choosing.choose(who, order, floor)
        num_ordinary = sum(candidate.class_ == 0 for candidate in chosen)
        if num_ordinary < order.num and not (is_final or order.again or self._is_all(who.run)):
            return None, num_stale
        return self._grant(who, chosen, order), num_stale

    def _is_all(self, run: str) -> bool:
        """Whether nothing more can come: the run is over, or its tasks ran out, no explorer is making a group, and
        none waits for a reward: it comes, or its deadline does."""
        if self.runs.is_finished(run):
            return True
        return self.runs.has_ended(run) and self.entries.ledger.is_settled(run) and not self.entries.is_any_waiting(run)

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
            "AND granted = 0 AND oldest_version >= 0 AND oldest_version < ? ORDER BY oldest_version DESC, ledger, seq",
            (order.buffer, who.run, floor),
        )
        for (seq,) in stale:
            self.entries.discard(who.run, seq, EntryState.DROPPED, Refund.STALE.value, Refund.STALE)
        return len(stale)

    def _grant(self, who: Incarnation, chosen: Sequence[Found], order: Order) -> list[Grant]:
        expires, step = self.db.now + self.runs.lease_s, None if order.step is None else order.step + 1
        grants, rows = [], []
        staleness = {oldest: self.versions.staleness(who.run, oldest) for oldest in {c.oldest for c in chosen}}
        for c in chosen:
            use_no = 1 if c.max_uses == 1 else self._next_use(c.seq, who.run)
            age = staleness[c.oldest] if c.is_of(who.run) else 0
            grants.append(Grant(c.seq, c.entry, c.revision, use_no, age, bool(c.class_)))
            rows.append((c.seq, c.revision, who.run, use_no, step, who.owner, who.epoch, expires))
        self.db.execute_many(
            "INSERT INTO uses(entry, revision, consumer, use_no, state, step, owner, epoch, expires) "
            "VALUES (?, ?, ?, ?, 'leased', ?, ?, ?, ?)",
            rows,
        )
        if order.max_uses > 1:
            self.db.execute_many(
                "UPDATE entries SET max_uses = ? WHERE seq = ? AND max_uses < ?",
                [(order.max_uses, c.seq, order.max_uses) for c in chosen if not c.class_],
            )
        self.db.execute_many(
            "UPDATE entries SET granted = granted + 1 WHERE seq = ?", [(c.seq,) for c in chosen if c.scope]
        )
        if rows:
            self.db.count(f"granted/{who.run}", len(rows))
            self.db.touched.add("stock")
            self.choosing.settle(order.buffer)
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
            FencedError: A lease expired, and its use was granted to somebody else or its entry taken out since.
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
        seq, entry_state = self.entries.locate(entry)
        rows = self.db.all(
            "SELECT id, state, owner, epoch FROM uses WHERE entry = ? AND consumer = ? AND use_no = ? ORDER BY id DESC",
            (seq, who.run, use_no),
        )
        if not rows:
            raise StoreError(
                where, "acknowledged, but never granted", "a leased use", "is this the buffer of that checkpoint?"
            )
        active = next((row for row in rows if row[1] != "returned"), None)
        if active is not None and active[2] != who.owner and active[3] == who.epoch:
            raise _is_late(where, "another process took it")
        if active is not None and active[1] == "acked":
            return []
        if active is None and entry_state not in (EntryState.READY, EntryState.SPENT) and not self._is_deleted(seq):
            if rows[0][3] == who.epoch:
                raise _is_late(where, f"its entry is {entry_state.value} since")
            return []  # a checkpoint holds what the store gave up since: it goes on, and the entry stays as it is
        chosen = active or rows[0]
        self.db.execute(
            "UPDATE uses SET state = 'acked', step = coalesce(step, ?), checkpoint = ? WHERE id = ?",
            (step, checkpoint, chosen[0]),
        )
        if active is None:
            self.db.execute("UPDATE entries SET granted = granted + 1 WHERE seq = ? AND scope != ''", (seq,))
        self._count_ack(seq)
        return [seq]

    def _is_deleted(self, seq: int) -> bool:
        """Whether only its name is left: steps that were trained on it are still noted."""
        return self.db.one("SELECT 1 FROM entries WHERE seq = ? AND reason = ?", (seq, REDACTED)) is not None

    def _count_ack(self, seq: int) -> None:
        self.db.execute(
            "UPDATE entries SET acked = acked + 1, "
            "state = CASE WHEN acked + 1 >= max_uses AND state = 'ready' THEN 'spent' ELSE state END "
            "WHERE seq = ? AND scope != ''",
            (seq,),
        )

    def give_back(self, who: Incarnation, uses: Sequence[tuple[str, int]] | None, dropped_by: str = "") -> int:
        """Return leases of this owner untrained; with None all of this consumer. The number returned.

        `dropped_by`: entries of this run that have no other use, and were not amended meanwhile, are dropped for that
        reason, and give their slots back.
        """
        self.runs.check(who)
        if uses is None:
            sql = "SELECT id, entry, revision FROM uses WHERE consumer = ? AND state = 'leased'"
            rows = self.db.all(sql, (who.run,))
        else:
            sql = (
                "SELECT id, entry, revision FROM uses WHERE entry = (SELECT seq FROM entries WHERE entry = ?) "
                "AND consumer = ? AND use_no = ? AND state != 'returned' AND state = 'leased' AND owner = ?"
            )
            rows = [row for entry, use_no in uses for row in self.db.all(sql, (entry, who.run, use_no, who.owner))]
        self.take_back(who, [(use, seq) for use, seq, _ in rows])
        if dropped_by:
            sql = (
                "SELECT 1 FROM entries WHERE seq = ? AND revision = ? AND scope = ? AND granted = 0 AND state = 'ready'"
            )
            for seq in [seq for _, seq, revision in rows if self.db.one(sql, (seq, revision, who.run))]:
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
        """Return leases of others whose heartbeat stopped, and settle what is due (`Entries.settle_due`).

        Who calls is alive, however late its beat is: after a suspended machine wakes, its batch is still in its hands.
        """
        late = self.db.all(
            "SELECT id, entry FROM uses WHERE consumer = ? AND state = 'leased' AND expires <= ? AND owner != ?",
            (who.run, self.db.now, who.owner),
        )
        self.take_back(who, late)
        self.entries.settle_due(who)


def _is_late(where: str, found: str) -> FencedError:
    return FencedError(where, f"its lease expired and {found}", "a live lease", "raise buffer.lease_s")
