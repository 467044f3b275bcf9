"""Entries and their revisions: one put, what became of it, and its bytes (CONTRACTS C3)."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from triune.buffer.damage import DAMAGED, Damaged, damaged
from triune.buffer.database import Database
from triune.buffer.ledger import AdmissionLedger
from triune.buffer.new_entries import NewEntry, Put, insert_entries, new_entry, without_repeats
from triune.buffer.overlay import apply_overlay
from triune.buffer.parcels import Parcel, encode_revision
from triune.buffer.runs import Incarnation, Runs
from triune.buffer.segments import Blobs, live_bytes
from triune.buffer.summary import summarise
from triune.errors import RecordError, StoreError, WireError
from triune.failpoints import failpoint
from triune.ports import EntryInfo, EntryState, Refund
from triune.records import Group, GroupId, decode_group

log = logging.getLogger("triune.buffer")

MAIN = "main"
"""The run's own buffer: its entries are for the run that put them. Other buffers are open to every run."""


class Stored(NamedTuple):
    """A revision's bytes as they were read.

    Attributes:
        raw: Revision 0, which an overlay changes.
        blob: The revision itself.
        is_whole: Whether it is a group by itself, or an overlay.
    """

    raw: bytes | WireError
    blob: bytes | WireError
    is_whole: bool

    def decode(self) -> Group:
        """The group; it needs no transaction.

        Raises:
            WireError: The bytes are damaged, or not there.
        """
        if isinstance(self.blob, WireError):
            raise self.blob
        if self.is_whole:
            return decode_group(self.blob)
        if isinstance(self.raw, WireError):
            raise self.raw
        return apply_overlay(decode_group(self.raw), self.blob)


def decode_all(found: Mapping[int, Stored], names: Mapping[int, str]) -> dict[int, Group]:
    """Entry's position → group, of all that were loaded; it needs no transaction.

    Args:
        found: What `Entries.load` found.
        names: Entry's position → its name, for the error.

    Raises:
        Damaged: The bytes of some are not those that were stored; names them all.
    """
    groups: dict[int, Group] = {}
    wrong: dict[int, str] = {}
    for seq, stored in found.items():
        try:
            groups[seq] = stored.decode()
        except RecordError as error:
            wrong[seq] = error.found
    if wrong:
        raise damaged(names, wrong)
    return groups


_NONE = (0, "")
"""The admission of a group that takes no slot."""

_DUE = (
    "SELECT 0, seq, scope, state, granted FROM entries WHERE scope IN (?1, '') "
    "AND seq IN (SELECT entry FROM amendments WHERE outcome = 'deferred') "
    "UNION ALL SELECT 1, seq, scope, state, granted FROM entries e WHERE deadline IS NOT NULL AND deadline <= ?2 "
    "AND scope IN (?1, '') AND state IN ('waiting', 'ready') AND NOT EXISTS "
    "(SELECT 1 FROM uses u WHERE u.entry = e.seq AND u.state != 'returned' AND u.state = 'leased' "
    "AND (u.expires > ?2 OR u.consumer = e.scope)) ORDER BY 1, 2"
)
"""(whether it is past its deadline, …) of a run's entries and those open to all; one that a trainer has is left."""


class Entries:
    """Put, revise, read and browse."""

    def __init__(
        self,
        db: Database,
        runs: Runs,
        ledger: AdmissionLedger,
        blobs: Blobs | None = None,
        reward_deadline_s: float = 86400.0,
    ) -> None:
        """`reward_deadline_s`: how long an entry waits whose reward an amendment took away."""
        self.db, self.runs, self.ledger, self.blobs = db, runs, ledger, blobs or Blobs(db)
        self.reward_deadline_s = reward_deadline_s
        self.on_put: Callable[[Incarnation, str, int], object] = lambda who, buffer, num: None
        """Called with (who, buffer, num) after entries of a run became ready; set by the store (capacity)."""
        self.on_deadline: Callable[[str, int], bool] = lambda run, seq: False
        """Called with (run, seq) for a group whose rewards did not all come; whether it goes on without them."""
        self.on_deferred: Callable[[Incarnation, int], object] = lambda who, seq: None
        """Called with (who, seq) for an entry with amendments that were put off; set by the store."""

    # ---- writing

    def put(self, who: Incarnation, puts: Sequence[Put]) -> list[tuple[str, int | None]]:
        """Store closed groups, in order; of each its id, and its position where it is now ready.

        A repeated put changes nothing, nor does that of a group which another explorer makes by now; it is counted.
        What several need is asked and written once, so that many together cost less than one by one.
        """
        self.runs.check(who)
        outcomes: list[tuple[str, int | None]] = []
        for part in without_repeats(puts):
            outcomes += self._put(who, part)
        return outcomes

    def _put(self, who: Incarnation, puts: Sequence[Put]) -> list[tuple[str, int | None]]:
        own = [put.parcel.id for put in puts if put.parcel.id.run == who.run]
        admissions = self.ledger.close(who, own)
        last = 0 if len(admissions) == len(puts) else self.ledger.last_seq()
        kept = [put for put in puts if admissions.get(put.parcel.id, _NONE)[1] != "taken"]
        if len(kept) < len(puts):
            self.db.count("late", len(puts) - len(kept))
        rows = [self._row_of(who, put, admissions.get(put.parcel.id), last) for put in kept]
        positions = self._insert(rows, [put.parcel for put in kept])
        ready: dict[str, int] = {}
        num_ready: Counter[str] = Counter()
        for put, row in zip(kept, rows, strict=True):
            if row.entry not in positions:
                self._count_repeat(put.parcel, who.epoch)
                continue
            failpoint("buffer.put.inside")
            if row.admission is not None:
                self.db.touched.add("slots")
                if row.state == EntryState.DROPPED:
                    self.ledger.refund(who.run, row.admission, (put.refund or Refund.DROPPED).value)
            self.db.touched.add("entries")
            if row.state == EntryState.READY:
                ready[row.entry] = positions[row.entry]
                num_ready[put.buffer] += bool(row.scope)
        for buffer, num in num_ready.items():
            if num:
                self.on_put(who, buffer, num)
        return [(entry, ready.get(entry)) for entry in map(str, [put.parcel.id for put in puts])]

    def _row_of(self, who: Incarnation, put: Put, admission: tuple[int, str] | None, last: int) -> NewEntry:
        seq, held = admission or _NONE
        state, reason = self._first_state(put, held)
        scope = who.run if put.buffer == MAIN else ""
        deadline = self.db.now + put.deadline_s if state is EntryState.WAITING else None
        holds = seq if held == "open" else None
        ledger = last if admission is None else seq
        return new_entry(put.parcel, put.buffer, scope, state, reason, ledger, holds, who.epoch, deadline, self.db.now)

    def _first_state(self, put: Put, held: str) -> tuple[EntryState, str]:
        """`held`: state of the admission. Operators have no say before the last reward is there."""
        if put.refund is not None:
            return EntryState.DROPPED, put.dropped_by or put.refund.value
        if held == "refunded":  # its slot was given to others while its maker was thought dead
            return EntryState.DROPPED, put.dropped_by or "late"
        if put.parcel.summary.is_waiting:
            return EntryState.WAITING, ""
        if put.dropped_by:
            return EntryState.DROPPED, put.dropped_by
        return (EntryState.READY if put.parcel.is_shaped else EntryState.RAW), ""

    def _insert(self, rows: Sequence[NewEntry], parcels: Sequence[Parcel]) -> dict[str, int]:
        """Write those that are not there, with their blobs; entry → position of each that was written."""
        positions = insert_entries(self.db, rows)
        revisions: list[tuple[int, int, bool, str, bytes]] = []
        for row, parcel in zip(rows, parcels, strict=True):
            seq = positions.get(row.entry)
            if seq is None:
                continue
            revisions.append((seq, 0, True, "[]", self.blobs.keep(seq, 0, parcel.raw)))
            if parcel.shaped is not None:
                held = self.blobs.keep(seq, 1, parcel.shaped)
                revisions.append((seq, 1, parcel.is_whole, json.dumps(parcel.operators), held))
        if revisions:
            self.db.execute_many("INSERT INTO revisions VALUES (?, ?, ?, ?, ?)", revisions)
            self.db.count("puts", len(positions))
        return positions

    def _add_blob(self, seq: int, revision: int, is_whole: bool, operators: Sequence[str], blob: bytes) -> None:
        held = self.blobs.keep(seq, revision, blob)
        self.db.execute(
            "INSERT INTO revisions VALUES (?, ?, ?, ?, ?)", (seq, revision, is_whole, json.dumps(list(operators)), held)
        )

    def _count_repeat(self, parcel: Parcel, epoch: int) -> None:
        known = self.db.one("SELECT attempts, epoch FROM entries WHERE entry = ?", (str(parcel.id),))
        assert known is not None, "the insert met it"
        if known != (parcel.summary.attempts, epoch):
            self.db.count("late")

    def insert_free(
        self,
        parcel: Parcel,
        *,
        buffer: str,
        scope: str,
        state: EntryState,
        reason: str = "",
        lives_s: float | None = None,
    ) -> bool:
        """Store a group that takes no slot, for one run or (scope "") for all; False when it is there.

        With `lives_s` it expires, used or not, that many seconds from now.
        """
        [is_new] = self.insert_all_free(
            [parcel], buffer=buffer, scope=scope, state=state, reason=reason, lives_s=lives_s
        )
        return is_new

    def insert_all_free(
        self,
        parcels: Sequence[Parcel],
        *,
        buffer: str,
        scope: str,
        state: EntryState,
        reason: str = "",
        lives_s: float | None = None,
    ) -> list[bool]:
        """`insert_free` of several at once; of each whether it is new."""
        outcomes: list[bool] = []
        last = self.ledger.last_seq()
        deadline = None if lives_s is None else self.db.now + lives_s
        for part in without_repeats([Put(parcel, buffer=buffer) for parcel in parcels]):
            own = [put.parcel for put in part]
            rows = [new_entry(p, buffer, scope, state, reason, last, None, 0, deadline, self.db.now) for p in own]
            positions = self._insert(rows, own)
            outcomes += [row.entry in positions for row in rows]
        self.db.touched.add("entries")
        return outcomes

    def count_unused(self, who: Incarnation, buffer: str, enough: int) -> int:
        """Entries of this run in a buffer that can be leased for the first time; at `enough` it stops counting."""
        sql = (
            "SELECT count(*) FROM (SELECT 1 FROM entries WHERE buffer = ? AND scope = ? AND class = 0 "
            "AND state = 'ready' AND granted = 0 LIMIT ?) AS x"
        )
        return (self.db.one(sql, (buffer, who.run, enough)) or (0,))[0]

    def is_any_waiting(self, run: str) -> bool:
        """Whether an entry of a run waits for a reward."""
        sql = "SELECT 1 FROM entries WHERE deadline IS NOT NULL AND state = 'waiting' AND scope = ? LIMIT 1"
        return self.db.one(sql, (run,)) is not None

    def is_any_usable(self, run: str) -> bool:
        """Whether the run's own buffer holds an entry that the run may lease, or has used up."""
        sql = (
            f"SELECT 1 FROM entries WHERE buffer = '{MAIN}' AND scope IN (?, '') "
            "AND state IN ('ready', 'spent') LIMIT 1"
        )
        return self.db.one(sql, (run,)) is not None

    def count_by_taskset(self, who: Incarnation, buffer: str) -> dict[str, int]:
        """Entries of this run in a buffer, whatever became of them, by the task set in their names."""
        rows = self.db.all("SELECT entry FROM entries WHERE buffer = ? AND scope = ?", (buffer, who.run))
        return dict(Counter(GroupId.parse(entry).taskset for (entry,) in rows))

    def add_revision(
        self, seq: int, raw: Group, group: Group, operators: Sequence[str], default_state: EntryState
    ) -> int:
        """Append a revision of an entry that is not yet used up, and move the entry to where it belongs."""
        blob, is_whole, summary = encode_revision(raw, group, summarise(raw))
        revision = (self.db.one("SELECT max(revision) + 1 FROM revisions WHERE entry = ?", (seq,)) or (1,))[0]
        self._add_blob(seq, revision, is_whole, operators, blob)
        state = EntryState.WAITING if summary.is_waiting else default_state
        self.db.execute(
            "UPDATE entries SET revision = ?, score = ?, class = ?, reward = ?, advantage = ?, num_records = ?, "
            "state = ?, deadline = CASE WHEN ? = 'waiting' THEN coalesce(deadline, ?) "
            "WHEN state != 'waiting' THEN deadline END WHERE seq = ?",
            (
                revision,
                summary.score,
                int(summary.is_urgent),
                summary.reward,
                summary.advantage,
                summary.num_records,
                state.value,
                state.value,
                self.db.now + self.reward_deadline_s,
                seq,
            ),
        )
        self.db.touched.add("entries")
        return revision

    def revise(self, who: Incarnation, entry: str, group: Group, operators: Sequence[str]) -> int:
        """Add a revision; an entry that is not yet used up becomes ready, one that is keeps its state."""
        self.runs.check(who)
        seq, state = self.locate(entry)
        raw = self.read(seq, 0)
        usable = state in (EntryState.WAITING, EntryState.RAW, EntryState.SHAPING, EntryState.READY)
        if usable:
            return self.add_revision(seq, raw, group, operators, EntryState.READY)
        blob, is_whole, _ = encode_revision(raw, group, summarise(raw))
        revision = (self.db.one("SELECT max(revision) + 1 FROM revisions WHERE entry = ?", (seq,)) or (1,))[0]
        self._add_blob(seq, revision, is_whole, operators, blob)
        return revision

    def discard(
        self, run: str, seq: int, state: EntryState, reason: str, refund: Refund | None, *, is_due: bool = False
    ) -> None:
        """Take an entry out for good and give its slot back; `is_due`: its group is admitted again.

        Without `refund` it keeps its slot: a step was trained on it.
        """
        row = self.db.one(
            "UPDATE entries SET state = ?, reason = ?, deadline = NULL WHERE seq = ? RETURNING admission, scope",
            (state.value, reason, seq),
        )
        assert row is not None, "callers found it"
        if state is EntryState.EVICTED:
            self.db.count(f"evicted/{reason}")
        if row[0] is not None and refund is not None:
            self.ledger.refund(row[1] or run, row[0], refund.value, is_due=is_due)
        self.db.touched.add("entries")

    def refund(self, who: Incarnation, group: GroupId, reason: str) -> None:
        """Give a group's slot back, once; an entry of it that is not yet used is dropped for the same reason.

        A group that another explorer made, or makes by now, is left to it.
        """
        self.runs.check(who)
        admission = self.ledger.find(group, who.owner)
        if admission is None or admission[1] in ("refunded", "taken"):
            return
        if admission[1] == "put":
            row = self.db.one(
                "SELECT seq FROM entries WHERE entry = ? AND admission = ? AND granted = 0 "
                "AND state IN ('waiting', 'raw', 'shaping', 'ready')",
                (str(group), admission[0]),
            )
            if row is None:
                return
            self.discard(who.run, row[0], EntryState.DROPPED, reason, Refund(reason))
            return
        self.ledger.refund(who.run, admission[0], reason)

    def settle_due(self, who: Incarnation) -> None:
        """Carry out amendments that were put off, then expire what waited for its reward, or its turn, for too long.

        A group of which enough members have their reward goes on without the others; one that was trained on before is
        spent. Entries of other runs are left to these: their pipelines and their patience may be others.
        """
        amended = set[int]()
        for is_late, seq, scope, state, granted in self.db.all(_DUE, (who.run, self.db.now)):
            try:
                if not is_late:
                    self.on_deferred(who, seq)
                    amended.add(seq)
                elif seq not in amended:
                    self._end_waiting(scope, seq, state, granted)
            except Damaged as damage:
                log.warning("it waits in vain and is dropped: %s", damage)
                self.discard(scope, seq, EntryState.DROPPED, DAMAGED, Refund.DROPPED)

    def _end_waiting(self, scope: str, seq: int, state: str, granted: int) -> None:
        if state == EntryState.WAITING and self.on_deadline(scope, seq):
            return
        if granted:  # the deadline stays: should a resume take its uses back, it expires
            self.db.execute("UPDATE entries SET state = 'spent', max_uses = acked WHERE seq = ?", (seq,))
        else:
            self.discard(scope, seq, EntryState.EXPIRED, "deadline", Refund.INVALID)

    def drop_damaged(self, who: Incarnation, damage: Damaged) -> int:
        """Drop entries that turned out to be unreadable, so that nobody leases them; how many of them still waited."""
        self.runs.check(who)
        usable = "SELECT entry FROM entries WHERE seq = ? AND state IN ('waiting', 'raw', 'shaping', 'ready')"
        number = 0
        for seq, found in damage.entries.items():
            row = self.db.one(usable, (seq,))
            if row is not None:
                self.discard(who.run, seq, EntryState.DROPPED, DAMAGED, Refund.DROPPED)
                log.warning("entry %s is dropped, as it cannot be read: %s", row[0], found)
                number += 1
        return number

    # ---- reading

    def locate(self, entry: str) -> tuple[int, EntryState]:
        """(seq, state) of an entry.

        Raises:
            StoreError: There is none of that name.
        """
        row = self.db.one("SELECT seq, state FROM entries WHERE entry = ?", (entry,))
        if row is None:
            raise StoreError(
                f"entry {entry!r}", f"not in {self.db.where}", "an entry", "list them with `triune buffer ls`"
            )
        return row[0], EntryState(row[1])

    def read(self, seq: int, revision: int | None = None) -> Group:
        """One revision, the entry's newest by default.

        Raises:
            StoreError: There is no such revision.
            Damaged: Its bytes are not those that were stored.
        """
        rows = self.db.all(
            "SELECT revision, is_whole, blob FROM revisions WHERE entry = ? AND "
            "revision IN (0, coalesce(?, (SELECT revision FROM entries WHERE seq = ?))) ORDER BY revision",
            (seq, revision, seq),
        )
        if not rows or (revision is not None and rows[-1][0] != revision):
            raise self._has_no(seq, revision)
        needed = rows[-1:] if rows[-1][1] else rows
        blobs = self.blobs.load([(seq, row[0], row[2]) for row in needed])
        stored = Stored(blobs[0], blobs[-1], rows[-1][1])
        try:
            return stored.decode()
        except RecordError as error:
            raise damaged(self._names([seq]), {seq: error.found}) from error

    def load(self, wanted: Mapping[int, int]) -> dict[int, Stored]:
        """Entry's position → one revision of it, for many in one query.

        Raises:
            StoreError: There is no such revision.
        """
        rows = self.db.all(
            "SELECT entry, revision, is_whole, blob FROM revisions "
            f"WHERE entry IN ({', '.join('?' * len(wanted)) or 'NULL'}) ORDER BY entry, revision",
            tuple(wanted),
        )
        is_whole = {seq: whole for seq, revision, whole, _ in rows if revision == wanted[seq]}
        for seq in wanted.keys() - is_whole.keys():
            raise self._has_no(seq, wanted[seq])
        needed = [
            (seq, revision, held)
            for seq, revision, _, held in rows
            if revision == wanted[seq] or (revision == 0 and not is_whole[seq])
        ]
        blobs: dict[int, list[bytes | WireError]] = {}
        for (seq, _, _), blob in zip(needed, self.blobs.load(needed), strict=True):
            blobs.setdefault(seq, []).append(blob)
        return {seq: Stored(found[0], found[-1], is_whole[seq]) for seq, found in blobs.items()}

    def _names(self, seqs: Iterable[int]) -> dict[int, str]:
        rows = [self.db.one("SELECT seq, entry FROM entries WHERE seq = ?", (seq,)) for seq in seqs]
        return {row[0]: row[1] for row in rows if row is not None}

    def _has_no(self, seq: int, revision: int | None) -> StoreError:
        row = self.db.one("SELECT entry, state, reason FROM entries WHERE seq = ?", (seq,)) or (seq, "", "")
        where = f"entry {row[0]!r} in {self.db.where}"
        if row[1] == EntryState.EVICTED:
            do = "raise buffer.capacity for what is to be kept"
            return StoreError(where, f"evicted ({row[2]}): its bytes were freed", "an entry that is kept", do)
        return StoreError(where, f"no revision {revision}")

    def browse(self, buffer: str | None, state: str | None, limit: int) -> list[EntryInfo]:
        """Newest first."""
        rows = self.db.all(
            "SELECT e.entry, state, reason, revision, buffer, source, num_records, reward, oldest_version, score, "
            "(SELECT count(*) FROM uses u WHERE u.entry = e.seq AND u.state = 'acked'), created FROM entries e "
            "WHERE (?1 IS NULL OR buffer = ?1) AND (?2 IS NULL OR state = ?2) ORDER BY seq DESC LIMIT ?3",
            (buffer, state, limit),
        )
        return [
            EntryInfo(entry=row[0], state=EntryState(row[1]), **dict(zip(_INFO, row[2:], strict=True))) for row in rows
        ]

    def stats(self, run: str | None) -> Mapping[str, float]:
        """Depth per state, uses per state, admissions and refunds of the run, age of the oldest ready entry."""
        found: dict[str, Any] = {f"entries/{state.value}": 0 for state in EntryState}
        for state, number in self.db.all("SELECT state, count(*) FROM entries GROUP BY state"):
            found[f"entries/{state}"] = number
        found |= {f"uses/{state}": 0 for state in ("leased", "acked", "returned")}
        sql = "SELECT state, count(*) FROM uses WHERE ?1 IS NULL OR consumer = ?1 GROUP BY state"
        found |= {f"uses/{state}": number for state, number in self.db.all(sql, (run,))}
        sql = "SELECT sum(admitted), sum(refunded) FROM runs WHERE ?1 IS NULL OR run = ?1"
        found["admitted"], found["refunded"] = (number or 0 for number in self.db.one(sql, (run,)) or (0, 0))
        sql = "SELECT count(*) FROM admissions WHERE state = 'open' AND (?1 IS NULL OR run = ?1)"
        found["open"] = (self.db.one(sql, (run,)) or (0,))[0]
        oldest = self.db.one("SELECT min(created) FROM entries WHERE state = 'ready'")
        found["oldest_ready_s"] = max(0.0, self.db.now - oldest[0]) if oldest and oldest[0] is not None else 0.0
        counters = self.db.counters()
        found |= live_bytes(self.db)
        found["puts"], found["late"] = counters.get("puts", 0), counters.get("late", 0)
        prefix = f"refunds/{run}/"
        found |= {f"refunds/{name[len(prefix) :]}": n for name, n in counters.items() if name.startswith(prefix)}
        return {name: float(number) for name, number in found.items()}


_INFO = (
    "reason",
    "revision",
    "buffer",
    "source",
    "num_records",
    "reward",
    "oldest_version",
    "priority",
    "uses",
    "created_s",
)
