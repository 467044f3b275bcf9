"""Looks for damage and contradictions in a store: every byte is read, nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from triune.buffer.conservation import check_conservation
from triune.buffer.content import REDACTED
from triune.buffer.database import Row
from triune.buffer.query_columns import group_of
from triune.buffer.segments_gc import SegmentFact, survey
from triune.buffer.sqlite import SQLiteDatabase
from triune.buffer.store import Store
from triune.buffer.summary import summarise
from triune.errors import RecordError, TriuneError
from triune.ports import EntryState, WeightUpdate
from triune.records import Group

T = TypeVar("T")

PAGE = 128
"""Entries checked in one transaction."""

MAX_LOOKS = 10
"""How often an entry is looked at that changes all the time."""

_ROW = "SELECT seq, entry, state, reason, revision, num_records, reward FROM entries"

_RECOVER = "keep a copy of the file, then salvage it with `sqlite3 FILE .recover`"
_BRING = "restore it from a copy; runs skip the entries in it, and `triune buffer gc` can take them out"
_TAKE_OUT = "take it out with `triune buffer gc RUN --where \"entry = '…'\"`, or restore the store from a copy"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is not as it should be.

    Attributes:
        check: `file`, `segments`, `blobs`, `rows`, `references` or `conservation`.
        entry: Id of the entry; "" = it is about no single one.
        found: What is wrong.
        do: The next thing to do.
    """

    check: str
    entry: str
    found: str
    do: str


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """What was read, and everything that was wrong with it.

    Attributes:
        segments: Where large blobs are kept; "" = in their rows.
        num_segments: Files there.
        num_unreferenced_bytes: Bytes in them that nobody refers to, which is nothing wrong.
    """

    where: str
    num_entries: int
    num_blobs: int
    num_bytes: int
    findings: tuple[Finding, ...]
    segments: str = ""
    num_segments: int = 0
    num_unreferenced_bytes: int = 0


_DANGLING = {
    "a revision of an entry that is not there": (
        "SELECT r.entry, r.revision FROM revisions r WHERE NOT EXISTS (SELECT 1 FROM entries e WHERE e.seq = r.entry)"
    ),
    "a use of an entry that is not there": (
        "SELECT u.entry, u.id FROM uses u WHERE NOT EXISTS (SELECT 1 FROM entries e WHERE e.seq = u.entry)"
    ),
    "an amendment of an entry that is not there": (
        "SELECT a.entry, a.key FROM amendments a WHERE NOT EXISTS (SELECT 1 FROM entries e WHERE e.seq = a.entry)"
    ),
    "a use of a revision that is not there": (
        "SELECT e.entry, u.revision FROM uses u JOIN entries e ON e.seq = u.entry WHERE e.state <> 'evicted' "
        "AND NOT EXISTS (SELECT 1 FROM revisions r WHERE r.entry = u.entry AND r.revision = u.revision)"
    ),
    "the slot of an admission that is not there": (
        "SELECT e.entry, e.admission FROM entries e WHERE e.admission IS NOT NULL "
        "AND NOT EXISTS (SELECT 1 FROM admissions a WHERE a.seq = e.admission)"
    ),
    "an amendment that made an entry that is not there": (
        "SELECT e.entry, a.made FROM amendments a JOIN entries e ON e.seq = a.entry WHERE a.made <> '' "
        "AND NOT EXISTS (SELECT 1 FROM entries m WHERE m.entry = a.made)"
    ),
    "bytes in a segment that is not known": (
        "SELECT e.entry, b.segment FROM segment_blobs b JOIN entries e ON e.seq = b.entry "
        "WHERE NOT EXISTS (SELECT 1 FROM segments s WHERE s.name = b.segment)"
    ),
    "bytes in a segment for a revision that is not there": (
        "SELECT e.entry, b.revision FROM segment_blobs b JOIN entries e ON e.seq = b.entry WHERE NOT EXISTS "
        "(SELECT 1 FROM revisions r WHERE r.entry = b.entry AND r.revision = b.revision)"
    ),
    "a run in whose name it is kept that is not there": (
        "SELECT e.entry, e.scope FROM entries e WHERE e.scope <> '' "
        "AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.run = e.scope)"
    ),
}
"""References that must lead somewhere: what is wrong → (entry, what it refers to)."""


def check_file(path: Path) -> Finding | None:
    """What is wrong with a SQLite file at first sight, before it is opened: an opened empty file becomes a store."""
    if not path.is_file():
        return Finding(check="file", entry="", found=f"{path}: no such file", do="name the store, or restore it")
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(100)
    if head[:16] != b"SQLite format 3\0" or len(head) < 100:
        found = f"{path}: {size} bytes that begin with {head[:16]!r}: cut off, overwritten, or no SQLite database"
        return Finding(check="file", entry="", found=found, do="restore it from a copy")
    page = int.from_bytes(head[16:18], "big")
    wanted = int.from_bytes(head[28:32], "big") * (65536 if page == 1 else page)
    if size < wanted:
        found = f"{path}: {size} bytes of {wanted}: its end is missing"
        return Finding(check="file", entry="", found=found, do=_RECOVER)
    return None


def attempt(work: Callable[[], T], check: str, entry: str = "") -> T | Finding:
    """What `work` returns, or why it could not: in damaged bytes there may be anything, so anything may go wrong."""
    try:
        return work()
    except TriuneError as error:
        expected = f"; expected {error.expected}" if error.expected else ""
        return Finding(check=check, entry=entry, found=f"{error.found}{expected}", do=error.do or _RECOVER)
    except Exception as error:  # the boundary of a look at damage
        found = f"it cannot be read ({type(error).__name__}: {error})"
        return Finding(check=check, entry=entry, found=found, do=_RECOVER)


def verify(store: Store, *, beside: tuple[Finding, ...] = ()) -> Verified:
    """Read every row and blob of a store: SQLite's own check, checksums, the conservation law, references.

    `beside` are findings of before it was opened. Damage is reported, never raised.
    """
    work = _Verification(store)
    work.findings += beside
    for part in (
        work.check_pages,
        work.check_segments,
        work.check_entries,
        work.check_other_blobs,
        work.check_references,
        work.check_sums,
    ):
        part()
    return Verified(
        where=store.db.where,
        num_entries=work.num_entries,
        num_blobs=work.num_blobs,
        num_bytes=work.num_bytes,
        findings=tuple(work.findings),
        segments=work.segments,
        num_segments=work.num_segments,
        num_unreferenced_bytes=work.num_unreferenced_bytes,
    )


class _Verification:
    def __init__(self, store: Store) -> None:
        self.store, self.db = store, store.db
        self.num_entries = self.num_blobs = self.num_bytes = 0
        self.findings: list[Finding] = []
        self.segments, self.num_segments, self.num_unreferenced_bytes = "", 0, 0
        self.has_place = True

    def _find(self, check: str, found: str, do: str, entry: str = "") -> None:
        self.findings.append(Finding(check=check, entry=entry, found=found, do=do))

    def _read(self, check: str, work: Callable[[], T], entry: str = "", *, looks: bool = True) -> T | None:
        """A transaction whose failure is a finding."""

        def read() -> T:
            with self.db.transaction(looks=looks):
                return work()

        return self._note(attempt(read, check, entry))

    def _note(self, outcome: T | Finding) -> T | None:
        if isinstance(outcome, Finding):
            self.findings.append(outcome)
            return None
        return outcome

    # ---- the file

    def check_pages(self) -> None:
        """SQLite's own look at all pages and indexes; a server checks its own."""
        if isinstance(self.db, SQLiteDatabase):
            rows = self._read("file", lambda: self.db.all("PRAGMA integrity_check(20)"))
            for (text,) in rows or ():
                if text != "ok":
                    self._find("file", f"integrity_check: {text}", _RECOVER)

    # ---- segments

    def check_segments(self) -> None:
        """Every segment is there, and long enough; what is in it is read with its entries."""

        def look() -> list[SegmentFact]:
            place = self.store.blobs.find_place()
            if place is None:
                return []
            self.segments, self.has_place = place.where, place.is_marked()
            return survey(self.store, place) if self.has_place else []

        facts = self._read("segments", look, looks=False)
        if facts is None:
            self.has_place = False
        elif not self.has_place:
            do = "mount it, or name where it was moved in buffer.segments.url; what is in it was not read"
            self._find("segments", f"{self.segments}: the place is not there: it has no mark", do)
        for fact in facts or ():
            self.num_segments += 1
            self.num_unreferenced_bytes += fact.dead
            if fact.num_blobs and fact.size is None:
                self._find("segments", f"{fact.name} is missing: {fact.num_blobs} blobs in {fact.live} bytes", _BRING)
            elif fact.size is not None and fact.size < fact.end:
                self._find("segments", f"{fact.name}: {fact.size} bytes of {fact.end}: its end is missing", _BRING)

    # ---- entries

    def check_entries(self) -> None:
        """Every revision of every entry can be decoded, and the row says what it holds."""
        after: int | None = -1
        while after is not None:
            after = self._check_page(after)

    def _check_page(self, after: int) -> int | None:
        """Check the entries after a position; the last one's position, None at the end."""
        sql = f"{_ROW} WHERE seq > ? ORDER BY seq LIMIT ?"
        rows = self._read("rows", lambda: self.db.all(sql, (after, PAGE)))
        if rows is None:
            self._find("rows", f"entries behind number {max(after, 0)} cannot be read", _RECOVER)
            return None
        for row in rows:
            self.num_entries += 1
            self._check_entry(row)
        return rows[-1][0] if len(rows) == PAGE else None

    def _check_entry(self, row: Row) -> None:
        """Check one entry, again if it was changed on the way: its row and its bytes are then of two moments."""
        for _ in range(MAX_LOOKS):
            before = len(self.findings), self.num_blobs, self.num_bytes
            seq, entry, state, reason, _, num_records, reward = row
            groups = self._check_revisions(seq, str(entry))
            if groups and reason != REDACTED and state != EntryState.EVICTED:
                check = partial(self._check_row, str(entry), groups[-1], num_records, reward)
                self._note(attempt(check, "rows", str(entry)))
            if len(self.findings) == before[0]:
                return
            now = self._read("rows", partial(self.db.one, f"{_ROW} WHERE seq = ?", (seq,)), str(entry))
            if now is None or now[1:5] == row[1:5]:
                return
            del self.findings[before[0] :]
            (self.num_blobs, self.num_bytes), row = before[1:], now

    def _check_revisions(self, seq: int, entry: str) -> list[Group]:
        sql = (
            "SELECT r.revision, length(r.blob), s.size FROM revisions r LEFT JOIN segment_blobs s "
            "ON s.entry = r.entry AND s.revision = r.revision WHERE r.entry = ? ORDER BY r.revision"
        )
        rows = self._read("rows", lambda: self.db.all(sql, (seq,)), entry) or []
        found = []
        if not self.has_place and any(size is not None for _, _, size in rows):
            return found  # one finding says it of all
        for revision, in_row, in_segment in rows:
            self.num_blobs += 1
            self.num_bytes += (in_row or 0) + (in_segment or 0)
            group = self._check_blob(seq, entry, revision)
            if group is not None:
                found.append(group)
        return found

    def _check_blob(self, seq: int, entry: str, revision: int) -> Group | None:
        def read() -> Group:
            with self.db.transaction():
                return self.store.entries.read(seq, revision)

        group = attempt(read, "blobs", entry)
        if isinstance(group, Finding):
            self._find("blobs", f"revision {revision}: {group.found}", _TAKE_OUT, entry)
            return None
        if group.id != attempt(lambda: group_of(entry), "rows"):
            self._find("blobs", f"revision {revision} is of {group.id}", _TAKE_OUT, entry)
        return group

    def _check_row(self, entry: str, group: Group, num_records: int, reward: float | None) -> None:
        """The newest revision's records keep their contract, and the row says what they are."""
        try:
            summary = summarise(group)
        except RecordError as error:
            self._find("rows", f"{error.where}: {error.found}; expected {error.expected}", _TAKE_OUT, entry)
            return
        if summary.num_records != num_records:
            self._find("rows", f"{num_records} records in its row, {summary.num_records} in its blob", _TAKE_OUT, entry)
        if not _are_close(summary.reward, reward):
            self._find("rows", f"reward {reward} in its row, {summary.reward} in its blob", _TAKE_OUT, entry)

    # ---- everything else

    def check_other_blobs(self) -> None:
        """Amendments, control rows and versions can be decoded."""
        for what, sql, kind in (
            ("amendment", "SELECT key, patch FROM amendments", dict),
            ("control row", "SELECT id, fields FROM control", dict),
            ("version", "SELECT version, record FROM versions WHERE record IS NOT NULL", WeightUpdate),
        ):
            for name, blob in self._read("blobs", lambda sql=sql: self.db.all(sql)) or ():
                self.num_blobs += 1
                self.num_bytes += len(blob)
                outcome = attempt(partial(msgspec.msgpack.decode, blob, type=kind), "blobs")
                if isinstance(outcome, Finding):
                    self._find("blobs", f"{what} {name}: {outcome.found}", "restore the store from a copy")

    def check_references(self) -> None:
        """What names something names what is there."""
        for what, sql in _DANGLING.items():
            for entry, other in self._read("references", lambda sql=sql: self.db.all(sql)) or ():
                name = entry if isinstance(entry, str) else f"number {entry}"
                self._find("references", f"{what} ({other})", "restore the store from a copy, or report this", name)

    def check_sums(self) -> None:
        """The conservation law."""
        self._read("conservation", lambda: check_conservation(self.db))


def _are_close(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is None and other is None
    return abs(one - other) <= 1e-6 * max(1.0, abs(one), abs(other))
