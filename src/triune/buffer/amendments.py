"""Late rewards and people: change what is not yet trained, reissue what is (CONTRACTS C7)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from triune.buffer.damage import Damaged
from triune.buffer.database import Database
from triune.buffer.entries import MAIN, Entries
from triune.buffer.parcels import make_parcel, operators_of
from triune.buffer.patch import apply_patch, check_patch, patched_members
from triune.buffer.runs import Incarnation, Runs
from triune.errors import RecordError
from triune.failpoints import failpoint
from triune.ports import EntryState, Refund
from triune.records import Experience, Group, GroupId, Source

log = logging.getLogger("triune.buffer")

Reshape = Callable[[Group], Group | None]
"""Raw group with its amendments → shaped group, or None to drop it: the run's pipeline."""

APPLIED, DEFERRED, REISSUED, EXPIRED = "applied", "deferred", "reissued", "expired"
_USABLE = (EntryState.WAITING, EntryState.RAW, EntryState.SHAPING, EntryState.READY)


class Amendments:
    """One row per amendment, idempotent by key."""

    def __init__(
        self,
        db: Database,
        runs: Runs,
        entries: Entries,
        reshape: Reshape | None,
        lives_s: float,
        min_group: int | None = None,
    ) -> None:
        """`min_group`: members that must have a reward at a group's deadline; None = all."""
        self.db, self.runs, self.entries, self.reshape, self.lives_s = db, runs, entries, reshape, lives_s
        self.min_group = min_group

    def amend(self, who: Incarnation, entry: str, patch: Mapping[str, Any], by: str, key: str) -> str:
        """Apply, defer, reissue or refuse; the outcome, which for a deferred one is the latest.

        What is leased, or belongs to a pipeline that this process has not, is deferred: the lease's end carries it out,
        or a process of the entry's run, as soon as it leases or waits for a slot.

        Raises:
            RecordError: The patch names something that cannot be amended, the entry holds no rollouts, or the key was
                used for something else.
            StoreError: There is no such entry.
        """
        self.runs.check(who)
        where = f"amendment {key!r} of {entry!r}"
        known = self._known(entry, patch, key, where)
        if known is not None:
            return known
        check_patch(patch, where)
        seq, state = self.entries.locate(entry)
        if state in _USABLE or state is EntryState.SPENT:
            self._check_kind(seq, where)
            is_deferred = self._is_leased(seq) or not self._has_pipeline_of(who, seq)
        else:
            is_deferred = False
        self.db.execute(
            "INSERT INTO amendments(key, entry, by, patch, outcome, at) VALUES (?, ?, ?, ?, ?, ?)",
            (key, seq, by, msgspec.msgpack.encode(patch), DEFERRED if is_deferred else EXPIRED, self.db.now),
        )
        if is_deferred:
            failpoint("buffer.amend.leased")
            self.db.touched.add("entries")
            return DEFERRED
        outcome = EXPIRED
        if state in _USABLE:
            self._set(key, APPLIED)
            outcome = self._apply(who.run, seq, state, patch)
        elif state is EntryState.SPENT:
            outcome, made = self._reissue(seq, who, patch)
            self._set(key, outcome, made)
        return outcome

    def _known(self, entry: str, patch: Mapping[str, Any], key: str, where: str) -> str | None:
        """The outcome of an amendment that was made before; None when the key is new."""
        row = self.db.one(
            "SELECT a.outcome, a.patch, e.seq, e.entry FROM amendments a JOIN entries e ON e.seq = a.entry "
            "WHERE a.key = ?",
            (key,),
        )
        if row is None:
            return None
        outcome, blob, seq, name = row
        before, now = msgspec.msgpack.decode(blob), msgspec.msgpack.decode(msgspec.msgpack.encode(patch))
        do = "give each amendment a key of its own"
        if name not in (entry, f"{entry}~{seq}"):  # its group was made again since
            raise RecordError(where, f"the key of an amendment of {name!r}", "a new key", do)
        if before not in ({}, now):  # {}: the entry was deleted, and with it what people said of it
            raise RecordError(where, "the key of another patch", "the same patch, or a new key", do)
        return outcome

    def _check_kind(self, seq: int, where: str) -> None:
        if not all(isinstance(record, Experience) for record in self.entries.read(seq, 0).records):
            do = "delete the entry with `triune buffer gc` and import it corrected"
            raise RecordError(where, "an entry of pairs or texts", "an entry of rollouts", do)

    def _has_pipeline_of(self, who: Incarnation, seq: int) -> bool:
        """Whether this process shapes as the entry's run does."""
        row = self.db.one("SELECT scope FROM entries WHERE seq = ?", (seq,))
        return self.reshape is not None and row is not None and row[0] in (who.run, "")

    def _is_leased(self, seq: int) -> bool:
        """Whether a trainer may be at it. A lease of another run ends with its time, so that nobody is corrected too
        late for what a dead one holds; one of the entry's own run with that run's next lease or resume."""
        sql = (
            "SELECT 1 FROM uses u JOIN entries e ON e.seq = u.entry WHERE u.entry = ? AND u.state != 'returned' "
            "AND u.state = 'leased' AND (u.expires > ? OR u.consumer = e.scope) LIMIT 1"
        )
        return self.db.one(sql, (seq, self.db.now)) is not None

    def _set(self, key: str, outcome: str, made: str = "") -> None:
        self.db.execute("UPDATE amendments SET outcome = ?, made = ? WHERE key = ?", (outcome, made, key))

    def settle(self, who: Incarnation, seq: int) -> None:
        """Carry out what was deferred, in a process of the entry's run, unless a use is still leased."""
        if self._is_leased(seq):
            return
        rows = self.db.all(
            "SELECT key, patch FROM amendments WHERE entry = ? AND outcome = 'deferred' ORDER BY seq", (seq,)
        )
        for key, blob in rows:
            patch = msgspec.msgpack.decode(blob)
            (state,) = self.db.one("SELECT state FROM entries WHERE seq = ?", (seq,)) or (EntryState.EXPIRED,)
            try:
                if state == EntryState.SPENT:
                    outcome, made = self._reissue(seq, who, patch)
                    self._set(key, outcome, made)
                elif EntryState(state) in _USABLE:
                    self._set(key, APPLIED)
                    self._apply(who.run, seq, EntryState(state), patch)
                else:
                    self._set(key, EXPIRED)
            except Damaged as damage:  # what a step used is acknowledged all the same
                log.warning("an amendment expires: %s", damage)
                self._set(key, EXPIRED)

    def close(self, run: str, seq: int) -> bool:
        """The deadline of a group that waits has passed: go on without the members whose reward did not come.

        Whether it goes on: where fewer than `min_group` members have a reward it does not, and expires. The others
        become invalid, by an amendment of `deadline`, and advantages are computed from those that are there.
        """
        if self.min_group is None:
            return False
        group = self._amended(self.entries.read(seq, 0), seq)
        known = group.valid_members
        if len(known) < max(1, self.min_group):
            return False
        late = [member for member in group.members if member not in known]
        patch = {"members": {str(member): {"is_valid": False} for member in late}}
        sql = "SELECT count(*) FROM amendments WHERE entry = ? AND by = 'deadline'"  # it may wait again, and again
        number = (self.db.one(sql, (seq,)) or (0,))[0]
        self.db.execute(
            "INSERT INTO amendments(key, entry, by, patch, outcome, at) VALUES (?, ?, 'deadline', ?, ?, ?)",
            (f"deadline/{seq}/{number}", seq, msgspec.msgpack.encode(patch), APPLIED, self.db.now),
        )
        self._apply(run, seq, EntryState.WAITING, patch)
        return True

    def _apply(self, run: str, seq: int, state: EntryState, patch: Mapping[str, Any]) -> str:
        """A new revision: the raw group with all its amendments, shaped again."""
        raw = self.entries.read(seq, 0)
        if self.reshape is None:
            after = apply_patch(self.entries.read(seq), patch)
            default = EntryState.RAW if state is EntryState.RAW else EntryState.READY
            self.entries.add_revision(seq, raw, after, operators_of(after), default)
            return APPLIED
        amended = self._amended(raw, seq)
        if state is EntryState.RAW or amended.is_waiting:
            self.entries.add_revision(seq, raw, amended, operators_of(amended), EntryState.RAW)
            return APPLIED
        shaped = self.reshape(amended)
        if shaped is None:
            self.entries.discard(run, seq, EntryState.DROPPED, "reshape", Refund.DROPPED)
        else:
            self.entries.add_revision(seq, raw, shaped, operators_of(shaped), EntryState.READY)
        return APPLIED

    def _amended(self, raw: Group, seq: int) -> Group:
        sql = "SELECT patch FROM amendments WHERE entry = ? AND outcome = 'applied' ORDER BY seq"
        for (blob,) in self.db.all(sql, (seq,)):
            raw = apply_patch(raw, msgspec.msgpack.decode(blob))
        return raw

    # ---- what was already trained

    def _reissue(self, seq: int, who: Incarnation, patch: Mapping[str, Any]) -> tuple[str, str]:
        """A new urgent entry, one use: the members the patch names, with the advantages the whole group gives them."""
        raw = self.entries.read(seq, 0)
        members = patched_members(raw, patch)
        amended = apply_patch(self._amended(raw, seq), patch)
        if amended.is_waiting:
            return EXPIRED, ""  # nothing trains on a reward that is not known
        shaped = self.reshape(amended) if self.reshape is not None else apply_patch(self.entries.read(seq), patch)
        if shaped is None or not members:
            return EXPIRED, ""
        number = self.db.one("SELECT count(*) FROM amendments WHERE entry = ? AND outcome = 'reissued'", (seq,)) or (0,)
        group = GroupId(raw.id.run, "reissued", str(raw.id), number[0])
        part = [row for row in shaped.experiences if row.member in members]
        if not part:
            return EXPIRED, ""
        reissued = msgspec.structs.replace(raw, id=group, records=tuple(_as_human(row, group) for row in part))
        parcel = make_parcel(reissued, reissued)
        scope = self.db.one("SELECT scope FROM entries WHERE seq = ?", (seq,))
        assert scope is not None, "it was read"
        owner = scope[0] or who.run
        self.entries.insert_free(parcel, buffer=MAIN, scope=owner, state=EntryState.READY, lives_s=self.lives_s)
        return REISSUED, str(group)

    def reissued(self, key: str) -> str:
        """The entry that an amendment made; "" when it made none."""
        row = self.db.one("SELECT made FROM amendments WHERE key = ?", (key,))
        return row[0] if row else ""


def _as_human(row: Experience, group: GroupId) -> Experience:
    rollout = msgspec.structs.replace(row.id.rollout, group=group)
    return row.replace(
        id=msgspec.structs.replace(row.id, rollout=rollout), source=Source.HUMAN, parents=(*row.parents, str(row.id))
    )


def amendments_of(db: Database, seq: int) -> Sequence[Mapping[str, Any]]:
    """Who changed an entry, how, and what came of it, oldest first."""
    rows = db.all("SELECT key, by, patch, outcome, made, at FROM amendments WHERE entry = ? ORDER BY seq", (seq,))
    return [
        {"key": k, "by": by, "patch": msgspec.msgpack.decode(patch), "outcome": outcome, "made": made, "at_s": at}
        for k, by, patch, outcome, made, at in rows
    ]
