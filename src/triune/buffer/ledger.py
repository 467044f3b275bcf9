"""The admission ledger: who holds a slot, and where the tasks stand (CONTRACTS C5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from triune.buffer.database import Database
from triune.buffer.runs import Incarnation, Runs
from triune.failpoints import failpoint
from triune.ports import AdmissionRule, Refund
from triune.records import GroupId, Task

NO_MORE = "no more"
"""Answer of `admit` once the run was finished or its limit reached."""

FAILED = (Refund.INVALID, Refund.TOO_SMALL, Refund.QUARANTINED)
"""Refunds of groups whose rollouts failed."""

_FAILED = ", ".join(f"'{reason}'" for reason in FAILED)


def pack(value: Any) -> bytes:
    """JSON-like values as msgpack."""
    return msgspec.msgpack.encode(value)


class AdmissionLedger:
    """`admitted - refunded < (version + max_staleness + 1) x fresh`, in one transaction, for all explorers."""

    def __init__(self, db: Database, runs: Runs) -> None:
        self.db, self.runs = db, runs

    def admit(self, who: Incarnation, task: Task, rule: AdmissionRule, cursor: Any) -> GroupId | str | None:
        """Take a slot and advance the cursor; None = no slot now, `NO_MORE` = never again."""
        refused = self._take_slot(who, rule, cursor)
        if refused is not None:
            return refused if refused else None
        row = self.db.one(
            "SELECT max(visit) + 1 FROM admissions WHERE run = ? AND taskset = ? AND task_key = ?",
            (who.run, task.taskset, task.key),
        )
        visit = row[0] if row is not None and row[0] is not None else 0
        group = GroupId(who.run, task.taskset, task.key, visit)
        self._insert(who, group)
        failpoint("buffer.admit.inside")
        return group

    def admit_next(
        self, who: Incarnation, tasks: Sequence[tuple[Task, Any]], rule: AdmissionRule, after: Any
    ) -> list[GroupId] | str | None:
        """Admit tasks from the first on while there are slots; None = no slot now, `NO_MORE` = never again.

        None of them where a group is due, or another explorer went on from the cursor `after`: that comes first.
        Where several explorers are alive, each takes its share of the slots: whole batches for one would leave the
        others idle.
        """
        self.runs.check(who)
        if self._refusal(who, rule) == NO_MORE:
            return NO_MORE  # also for what is due
        if self._is_any_due(who) or self._went_on(who, after):
            return []
        others = max(0, self.runs.num_owners(who.run) - 2)  # besides this one, and the trainer
        share = math.ceil(self.free_slots(who, rule) / (1 + others))
        groups: list[GroupId] = []
        for task, cursor in tasks[: max(1, share)]:
            found = self.admit(who, task, rule, cursor)
            if not isinstance(found, GroupId):
                return groups or (found if found is not None or not self.recall_orphans(who) else [])
            groups.append(found)
        return groups

    def _is_any_due(self, who: Incarnation) -> bool:
        return self.db.one("SELECT 1 FROM admissions WHERE run = ? AND is_due = 1 LIMIT 1", (who.run,)) is not None

    def _went_on(self, who: Incarnation, after: Any) -> bool:
        """Whether the cursor of the newest admission is another than `after`."""
        row = self.db.one("SELECT cursor FROM runs WHERE run = ?", (who.run,))
        return bool(row and row[0] is not None and row[0] != pack(after))

    def _refusal(self, who: Incarnation, rule: AdmissionRule) -> str | None:
        """None when a slot is free, "" when there is none now, `NO_MORE` when there never will be."""
        row = self.db.one("SELECT admitted - refunded, line, finished FROM runs WHERE run = ?", (who.run,))
        assert row is not None, "the fence found the run"
        held, line, finished = row
        if finished is not None:
            return NO_MORE
        if rule.limit is not None and held >= rule.limit:
            return "" if self._may_be_refunded(who.run) else NO_MORE
        return None if held < (max(line, 0) + rule.max_staleness + 1) * rule.fresh else ""

    def _may_be_refunded(self, run: str) -> bool:
        """Whether a group is being made, or waits for a reward that may not come."""
        is_open = "SELECT 1 FROM admissions WHERE run = ? AND state = 'open' LIMIT 1"
        waits = "SELECT 1 FROM entries WHERE deadline IS NOT NULL AND state = 'waiting' AND scope = ? LIMIT 1"
        return any(self.db.one(sql, (run,)) is not None for sql in (is_open, waits))

    def _take_slot(self, who: Incarnation, rule: AdmissionRule, cursor: Any) -> str | None:
        """None when a slot was taken, else why not; see `_refusal`."""
        self.runs.check(who)
        refused = self._refusal(who, rule)
        if refused is not None:
            return refused
        if cursor is None:
            self.db.execute("UPDATE runs SET admitted = admitted + 1 WHERE run = ?", (who.run,))
        else:
            self.db.execute(
                "UPDATE runs SET admitted = admitted + 1, cursor = ? WHERE run = ?", (pack(cursor), who.run)
            )
        return None

    def _insert(self, who: Incarnation, group: GroupId, round_no: int = 0, retries: int = 0) -> None:
        self.db.execute(
            "INSERT INTO admissions(run, taskset, task_key, visit, round, retries, state, owner, epoch) "
            "VALUES (?, ?, ?, ?, ?, ?, 'open', ?, ?)",
            (group.run, group.taskset, group.task_key, group.visit, round_no, retries, who.owner, who.epoch),
        )

    def readmit(self, who: Incarnation, rule: AdmissionRule, max_retries: int) -> GroupId | str | None:
        """Admit the earliest group that is due again; None = no slot now, `NO_MORE` = none is due, or never again.

        A group that was stale more than `max_retries` times is quarantined instead.
        """
        self.runs.check(who)
        due = self.db.all(
            "SELECT seq, taskset, task_key, visit, round, retries, reason FROM admissions "
            "WHERE run = ? AND is_due = 1 ORDER BY seq",
            (who.run,),
        )
        if not due and self.recall_orphans(who):
            return self.readmit(who, rule, max_retries)
        for seq, taskset, key, visit, round_no, retries, reason in due:
            is_stale = reason == Refund.STALE
            if is_stale and retries >= max_retries:
                self.db.execute("UPDATE admissions SET is_due = 0 WHERE seq = ?", (seq,))
                self.db.count(f"refunds/{who.run}/quarantined")
                continue
            refused = self._take_slot(who, rule, None)
            if refused is not None:
                return refused or None
            self.db.execute("UPDATE admissions SET is_due = 0 WHERE seq = ?", (seq,))
            group = GroupId(who.run, taskset, key, visit)
            self._insert(who, group, round_no + 1, retries + is_stale)
            # What it left behind makes room for the entry it will become.
            self.db.execute("UPDATE entries SET entry = entry || '~' || seq WHERE entry = ?", (str(group),))
            return group
        return NO_MORE

    def free_slots(self, who: Incarnation, rule: AdmissionRule) -> int:
        """How many groups could be admitted now without waiting."""
        row = self.db.one("SELECT admitted - refunded, line FROM runs WHERE run = ?", (who.run,))
        assert row is not None, "an open run has its row"
        free = math.ceil((max(row[1], 0) + rule.max_staleness + 1) * rule.fresh - row[0])
        return max(0, free if rule.limit is None else min(free, rule.limit - row[0]))

    def find(self, group: GroupId, owner: str) -> tuple[int, str] | None:
        """(seq, state) of the group's newest admission; `taken` where it is not refunded, and another's than `owner`'s.

        That is so after others had to think `owner` dead, and admitted the group again.
        """
        return self._find([group], owner).get(group)

    def _find(self, groups: Sequence[GroupId], owner: str) -> dict[GroupId, tuple[int, str]]:
        sql = (
            "SELECT seq, CASE WHEN state = 'refunded' OR owner = ? THEN state ELSE 'taken' END FROM admissions "
            "WHERE run = ? AND taskset = ? AND task_key = ? AND visit = ? ORDER BY round DESC LIMIT 1"
        )
        rows = self.db.each(sql, [(owner, group.run, group.taskset, group.task_key, group.visit) for group in groups])
        return {group: (row[0], row[1]) for group, row in zip(groups, rows, strict=True) if row is not None}

    def close(self, who: Incarnation, groups: Sequence[GroupId]) -> dict[GroupId, tuple[int, str]]:
        """These groups are being put, their slots are held by their entries from now on; what `find` said before."""
        sql = (
            "UPDATE admissions SET state = 'put' WHERE run = ? AND taskset = ? AND task_key = ? AND visit = ? "
            "AND state = 'open' AND owner = ? RETURNING seq"
        )
        ids = [(group.run, group.taskset, group.task_key, group.visit, who.owner) for group in groups]
        rows = self.db.each(sql, ids)
        closed = {group: (row[0], "open") for group, row in zip(groups, rows, strict=True) if row is not None}
        return closed | self._find([group for group in groups if group not in closed], who.owner)

    def refund(self, run: str, seq: int, reason: str, *, is_due: bool = False) -> bool:
        """Give back the slot of one admission, once; whether it still held it. `is_due`: admit its group again."""
        row = self.db.one(
            "UPDATE admissions SET state = 'refunded', reason = ?, is_due = ? "
            "WHERE seq = ? AND state != 'refunded' RETURNING seq",
            (reason, is_due or reason == Refund.STALE, seq),
        )
        if row is None:
            return False
        self.db.execute("UPDATE runs SET refunded = refunded + 1 WHERE run = ?", (run,))
        self.db.count(f"refunds/{run}/{reason}")
        self.db.touched |= {"slots", "entries"}
        return True

    def recall_open(self, who: Incarnation) -> None:
        """Refund what is admitted but not put, and make it due again: its rollouts died with their process."""
        for (seq,) in self.db.all("SELECT seq FROM admissions WHERE run = ? AND state = 'open'", (who.run,)):
            self.refund(who.run, seq, Refund.LOST.value, is_due=True)

    def recall_orphans(self, who: Incarnation) -> int:
        """Do the same for what explorers of this incarnation held whose heartbeat has stopped; the number of them."""
        rows = self.db.all(
            "SELECT a.seq FROM admissions a LEFT JOIN owners o ON o.owner = a.owner "
            "WHERE a.run = ? AND a.state = 'open' AND a.owner != ? AND (o.expires IS NULL OR o.expires <= ?)",
            (who.run, who.owner, self.db.now),
        )
        for (seq,) in rows:
            self.refund(who.run, seq, Refund.LOST.value, is_due=True)
        return len(rows)

    def is_settled(self, run: str) -> bool:
        """Whether no group is being made or due."""
        sql = "SELECT 1 FROM admissions WHERE run = ?1 AND {} LIMIT 1"
        return not any(self.db.one(sql.format(part), (run,)) for part in ("state = 'open'", "is_due = 1"))

    def open_groups(self, who: Incarnation) -> list[GroupId]:
        """Groups neither put nor refunded that no other live owner works on; the caller takes them over."""
        self.runs.check(who)
        rows = self.db.all(
            "SELECT a.seq, a.taskset, a.task_key, a.visit FROM admissions a LEFT JOIN owners o ON o.owner = a.owner "
            "WHERE a.run = ? AND a.state = 'open' AND "
            "(a.owner = ? OR a.epoch < ? OR o.expires IS NULL OR o.expires <= ?) ORDER BY a.seq",
            (who.run, who.owner, who.epoch, self.db.now),
        )
        self.db.execute_many(
            "UPDATE admissions SET owner = ?, epoch = ? WHERE seq = ?", [(who.owner, who.epoch, row[0]) for row in rows]
        )
        return [GroupId(who.run, *row[1:]) for row in rows]

    def failures(self, run: str) -> dict[tuple[str, str], int]:
        """(task set, task key) → how many of its groups in a row failed until now, as the ledger tells.

        Groups that were overtaken, lost or are due again say nothing; one whose rewards never came did not fail.
        """
        rows = self.db.all(
            "SELECT taskset, task_key, visit, reason FROM admissions WHERE run = ?1 AND is_due = 0 "
            "AND state != 'open' AND (taskset, task_key) IN (SELECT taskset, task_key FROM admissions "
            f"WHERE run = ?1 AND reason IN ({_FAILED})) ORDER BY taskset, task_key, visit, round",
            (run,),
        )
        found: dict[tuple[str, str], int] = {}
        for taskset, key, visit, reason in rows:
            if reason in (Refund.STALE, Refund.LOST):
                continue
            failed = reason in FAILED and not self._has_expired(GroupId(run, taskset, key, visit))
            found[taskset, key] = found.get((taskset, key), 0) + 1 if failed else 0
        return {task: number for task, number in found.items() if number}

    def _has_expired(self, group: GroupId) -> bool:
        """Whether a group was put, and then waited for a reward in vain."""
        return self.db.one("SELECT 1 FROM entries WHERE entry = ? AND state = 'expired'", (str(group),)) is not None

    def cursor(self, who: Incarnation) -> Any:
        """The cursor of the newest admission; None at the start."""
        row = self.db.one("SELECT cursor FROM runs WHERE run = ?", (who.run,))
        return msgspec.msgpack.decode(row[0]) if row and row[0] is not None else None

    def last_seq(self) -> int:
        """Position of the newest admission of any run; 0 when there is none."""
        row = self.db.one("SELECT seq FROM admissions ORDER BY seq DESC LIMIT 1")
        return row[0] if row else 0
