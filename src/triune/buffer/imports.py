"""Takes experience of other runs and tools into a named buffer: once each, tagged, and with every refusal told."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
import numpy as np

from triune.buffer.content import REDACTED, entry_hash, num_without_behaviour
from triune.buffer.contents import Contents
from triune.buffer.deleted import IMPORTED, REFUSED, are_deleted, marks_of
from triune.buffer.incoming import (
    Format,
    Row,
    detect_format,
    entries_of_table,
    normalise,
    read_rows,
    refuse_unknown,
)
from triune.buffer.manifest import deleted_since
from triune.buffer.parcels import Parcel, make_parcel
from triune.buffer.query import Filter
from triune.buffer.query_columns import EntryRow, experiences_of
from triune.buffer.store import Store
from triune.buffer.table_rows import from_rows
from triune.buffer.transfer import LineWriter, from_plain
from triune.errors import ConfigError, RecordError, TaskError, TriuneError
from triune.ports import EntryState
from triune.records import Experience, Group, GroupId, Pair, Record, Task

Reader = Callable[[Format, GroupId, Task], Sequence[Record]]
"""Makes records of a row of text (`chat`, `sharegpt`, `pairs`); it needs a tokenizer, so whoever imports brings it."""

BATCH = 256
"""Entries that are looked up, and stored, in one transaction."""

_USABLE = {EntryState.READY: EntryState.READY, EntryState.SPENT: EntryState.READY, EntryState.RAW: EntryState.RAW}


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a file's rows.

    Attributes:
        num_entries: Entries in the file: rows of text are one each.
        num_new: Stored.
        num_duplicate: An entry with the same tokens is in the buffer already.
        num_filtered: The filter left them out.
        num_refused: Cannot be used; `reasons` says why and how often, `first` where that was met first (`FILE:ROW`).
        num_sequences: Sequences of the new ones.
        num_without_behaviour: Those of them whose sampled tokens have no behaviour log-prob: they are in no ratio, so
            only imitation and preference terms learn from them.
        rejects: File with the refused rows and their reasons; "" = none was refused.
    """

    num_entries: int
    num_new: int
    num_duplicate: int
    num_filtered: int
    num_refused: int
    num_sequences: int
    num_without_behaviour: int
    reasons: Mapping[str, int]
    first: Mapping[str, str]
    rejects: str


class _Candidate(NamedTuple):
    row: Row
    data: Any
    group: Group
    state: EntryState
    parcel: Parcel
    content: str


def import_file(
    store: Store,
    path: Path,
    *,
    into: str,
    reader: Reader,
    format: Format | None = None,
    wanted: Filter | None = None,
    tags: Sequence[str] = (),
    rejects: Path | None = None,
) -> Imported:
    """Store what a file holds in a named buffer, where every run may lease it. Doing it again adds nothing.

    Args:
        store: Where to.
        path: JSON(L), Parquet or Arrow file, or a folder of tables.
        into: Name of the buffer.
        reader: Makes records of rows of text.
        format: Of the rows; None = by the fields of each.
        wanted: Only entries that fit.
        tags: Put on every record.
        rejects: File for refused rows; None = beside `path`, with the ending `.rejects.jsonl`.

    Raises:
        ConfigError: The rows are of no known format.
        StoreError: The file is missing or not what its manifest says, or the store failed.
    """
    if format is not None and format not in get_args(Format):
        raise ConfigError("--format", f"found {format!r}", f"one of {', '.join(get_args(Format))}")
    work = _Import(store, path, into, reader, format, wanted or Filter(), tuple(tags))
    rejects = rejects or path.with_name(path.name + ".rejects.jsonl")
    with ExitStack() as files:
        for refusal in work.run():
            if work.rejects is None:
                work.rejects = files.enter_context(LineWriter(rejects))
            work.rejects.write(refusal)
    counts = work.counts
    return Imported(
        num_entries=sum(counts.values()),
        num_new=counts["new"],
        num_duplicate=counts["duplicate"],
        num_filtered=counts["filtered"],
        num_refused=counts["refused"],
        num_sequences=work.num_sequences,
        num_without_behaviour=work.num_unknown,
        reasons=dict(work.reasons.most_common()),
        first=work.first,
        rejects=str(rejects) if work.rejects is not None else "",
    )


class _Import:
    def __init__(
        self, store: Store, path: Path, into: str, reader: Reader, format: Format | None, wanted: Filter,
        tags: tuple[str, ...],
    ) -> None:  # fmt: skip
        self.store, self.path, self.into, self.reader = store, path, into, reader
        self.format: Format | None = format
        self.wanted, self.tags = wanted, tags
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.first: dict[str, str] = {}
        self.num_sequences = self.num_unknown = 0
        self.rejects: LineWriter | None = None
        self.gone = deleted_since(path)
        self.contents = Contents(store, into)

    def run(self) -> Iterator[dict[str, Any]]:
        """Store everything; yields what is refused."""
        self.contents.catch_up()
        batch: list[_Candidate] = []
        for number, rows in enumerate(entries_of_table(read_rows(self.path))):
            if number == 0 and not rows[0].refusal and (self.format or detect_format(rows[0].data)) is None:
                raise refuse_unknown(self.path, rows[0].data)
            data = rows[0].data if len(rows) == 1 else [row.data for row in rows]
            try:
                batch += self._candidate(rows, data)
            except (TaskError, RecordError) as error:
                yield self._refuse(rows[0], _reason(error), data)
            if len(batch) >= BATCH:
                yield from self._store(batch)
                batch.clear()
        yield from self._store(batch)

    def _refuse(self, row: Row, reason: str, data: Any) -> dict[str, Any]:
        self.counts["refused"] += 1
        self.reasons[reason] += 1
        self.first.setdefault(reason, f"{row.file}:{row.number}")
        return {"file": row.file, "row": row.number, "reason": reason, "data": data}

    def _candidate(self, rows: Sequence[Row], data: Any) -> list[_Candidate]:
        """What the rows of one entry are; none when it is filtered out."""
        first = rows[0]
        format = self.format if self.format is not None else detect_format(first.data)
        if first.refusal or format is None:
            raise TaskError("row", first.refusal or f"fields {', '.join(map(str, first.data))}", "a known format")
        if format == "entries":
            group, state = _stored(rows)
        else:
            group, state = self._read_text(first.data, format), EntryState.READY
        if str(first.data.get("entry")) in self.gone:
            raise TaskError("row", "deleted since it was exported", "an entry that may be used")
        if self.wanted.text and not self.wanted.fits(_row_of(group, self.into, state, first.data), group):
            self.counts["filtered"] += 1
            return []
        group = _tagged(group, self.tags)
        return [_Candidate(first, data, group, state, _parcel_of(group), entry_hash(group))]

    def _read_text(self, data: Mapping[str, Any], format: Format) -> Group:
        row = normalise(data, format)
        key = hashlib.blake2b(msgspec.json.encode(row, order="deterministic", enc_hook=str), digest_size=8).hexdigest()
        task = Task(key=key, taskset=self.path.stem, data=row)
        id_ = GroupId(IMPORTED, task.taskset, key, 0)
        records = [_without_credit(record) for record in self.reader(format, id_, task)]
        return Group(id=id_, task=task, records=tuple(records))

    def _store(self, batch: Sequence[_Candidate]) -> Iterator[dict[str, Any]]:
        outcomes = self.store.db.attempt(lambda: self._insert_all(batch)) if batch else []
        for found, outcome in zip(batch, outcomes, strict=True):
            if outcome not in ("new", "duplicate"):
                yield self._refuse(found.row, outcome, found.data)
                continue
            self.counts[outcome] += 1
            if outcome == "new":
                self.num_sequences += sum(len(experiences_of(record)) or 1 for record in found.group.records)
                self.num_unknown += num_without_behaviour(found.group)

    def _insert_all(self, batch: Sequence[_Candidate]) -> list[str]:
        """Store those that are not there yet; of each `new`, `duplicate`, or why not. Call it inside a transaction."""
        while self.contents.hash_page():  # what a run put meanwhile
            pass
        known = self.contents.known([found.content for found in batch])
        marks = [marks_of(found.group, found.content) for found in batch]
        gone = are_deleted(self.store.db, set().union(*marks))
        outcomes = []
        for found, its in zip(batch, marks, strict=True):
            if found.content in known:
                outcomes.append("duplicate")
            elif gone & its:
                outcomes.append("; expected ".join(REFUSED))
            else:
                outcomes.append(self._insert(found))
                known.add(found.content)
        return outcomes

    def _insert(self, found: _Candidate) -> str:
        """Store one: `new`, or why not. An id that names something else here gets another run's name."""
        if self._put(found.parcel, found):
            return "new"
        row = self.store.db.one("SELECT reason FROM entries WHERE entry = ?", (str(found.group.id),))
        if row is not None and row[0] == REDACTED:
            return "; expected ".join(REFUSED)
        if self._put(_parcel_of(_renamed(found.group, self.into)), found):
            return "new"
        return "its id and content are in this store already; expected a new one"

    def _put(self, parcel: Parcel, found: _Candidate) -> bool:
        if not self.store.entries.insert_free(parcel, buffer=self.into, scope="", state=found.state):
            return False
        self.contents.add(str(parcel.id), found.content)
        return True


def _parcel_of(group: Group) -> Parcel:
    """Checked and encoded; raises RecordError, also for fields of a kind that no check expects."""
    try:
        return make_parcel(group, group)
    except (TypeError, ValueError, AttributeError) as error:
        raise RecordError(str(group.id), f"{type(error).__name__}: {error}", "fields of the right kinds") from error


def _reason(error: TriuneError) -> str:
    return error.found + (f"; expected {error.expected}" if error.expected else "")


def _stored(rows: Sequence[Row]) -> tuple[Group, EntryState]:
    """An entry of our own export.

    Raises:
        RecordError: It is malformed.
        TaskError: It was not to be trained on where it is from, or waits for its reward.
    """
    data = rows[0].data
    plain = data.get("group")
    group = from_rows([row.data for row in rows]) if "tokens" in data else from_plain(_mapping(plain))
    state = data.get("state")
    if state not in list(_USABLE):
        raise TaskError("row", f"state {state}", f"one of {', '.join(_USABLE)}")
    unknown = [one for record in group.records for one in experiences_of(record) if one.is_valid and one.reward is None]
    if unknown and not any(isinstance(record, Pair) for record in group.records):
        raise TaskError("row", "an unknown reward", "rewards in all imported entries")
    return group, _USABLE[EntryState(state)]


def _mapping(plain: Any) -> Mapping[str, Any]:
    if not isinstance(plain, Mapping):
        raise RecordError("row", f"group is {plain!r:.40}", "a mapping")
    return plain


def _without_credit(record: Record) -> Record:
    """An answer nobody rewarded: where a loss asks for advantages, they are 0."""
    if not isinstance(record, Experience):
        return record
    return record.with_streams(advantages=np.zeros(len(record), dtype=np.float32))


def _tagged(group: Group, tags: tuple[str, ...]) -> Group:
    if not tags:
        return group

    def tag(record: Record) -> Record:
        names = sorted({*record.info.get("tags", ()), *tags})
        return msgspec.structs.replace(record, info={**record.info, "tags": names})

    return group.with_records([tag(record) for record in group.records])


def _renamed(group: Group, buffer: str) -> Group:
    """The same under another run's name, made of what it holds and where it goes: names are unique in a store."""
    digest = hashlib.blake2b(f"{buffer}/{entry_hash(group)}".encode(), digest_size=4).hexdigest()
    id_ = GroupId(f"{group.id.run}@{digest}", group.id.taskset, group.id.task_key, group.id.visit)

    def rename(record: Record) -> Record:
        if isinstance(record, Experience):
            rollout = msgspec.structs.replace(record.id.rollout, group=id_)
            return record.replace(id=msgspec.structs.replace(record.id, rollout=rollout))
        if isinstance(record, Pair):
            return msgspec.structs.replace(record, chosen=rename(record.chosen), rejected=rename(record.rejected))
        return record

    return msgspec.structs.replace(group, id=id_, records=tuple(rename(record) for record in group.records))


def _row_of(group: Group, buffer: str, state: EntryState, data: Mapping[str, Any]) -> EntryRow:
    """What a filter sees of an entry that is not stored yet; it has no age, no uses and no staleness."""
    summary = _parcel_of(group).summary
    return EntryRow(
        seq=0, entry=str(group.id), buffer=buffer, scope="", state=str(data.get("state", state)), reason="",
        source=summary.source, reward=summary.reward, priority=summary.score, urgent=summary.is_urgent,
        num_records=summary.num_records, version=summary.oldest_version, newest_version=summary.newest_version,
        revision=0, epoch=0, staleness=0, age_s=0.0, uses=0, leased=0,
    )  # fmt: skip
