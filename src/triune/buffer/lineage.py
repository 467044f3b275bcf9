"""Where an entry came from, and where it went: task, weights, operators, people, steps."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from triune.buffer.amendments import amendments_of
from triune.buffer.entry_walk import read_entry, rows_that_fit
from triune.buffer.query import equals
from triune.buffer.query_columns import EntryRow, experiences_of, group_of, tags_of
from triune.buffer.store import Store
from triune.errors import ConfigError, RecordError, StoreError
from triune.records import Experience, ExperienceId, Group, Record, RolloutId, Task, Text


class VersionFact(msgspec.Struct, frozen=True, kw_only=True):
    """Weights that sampled some of the tokens.

    Attributes:
        num_tokens: Tokens that they sampled.
        step: Trainer step after which they were published; None = not a version of this store.
        state: `committed`, `lost` (a resume went back behind it), `reserved`, or `unknown`.
        digest: Of the weights.
    """

    version: int
    num_tokens: int
    step: int | None = None
    state: str = "unknown"
    digest: str = ""
    epoch: int | None = None


class RecordFact(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence of the newest revision.

    Attributes:
        reward: None = not known.
        reward_parts: Raw and unweighted.
        num_tokens: All of them.
        num_actions: Those that were sampled.
        num_unknown: Sampled tokens without a behaviour log-prob: only imitation learns from them.
        streams: Names of its further arrays: `advantages`, `teacher_logprobs`, …
        parents: Ids it was made from.
        operators: That touched it, in order.
    """

    id: str
    reward: float | None = None
    reward_parts: Mapping[str, float] = {}
    is_valid: bool = True
    source: str = ""
    stop: str = ""
    num_tokens: int = 0
    num_actions: int = 0
    num_unknown: int = 0
    streams: tuple[str, ...] = ()
    parents: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()


class RevisionFact(msgspec.Struct, frozen=True, kw_only=True):
    """One state of the entry; 0 is as it was put. `num_bytes` is what it takes in the store."""

    revision: int
    operators: tuple[str, ...]
    num_bytes: int


class UseFact(msgspec.Struct, frozen=True, kw_only=True):
    """One use by a trainer.

    Attributes:
        entry: What was used.
        revision: Which state of it.
        use_no: The how-manieth use by this consumer.
        state: `leased` (a step works on it, or its checkpoint is not written yet), `acked` (the checkpoint contains
            it), `returned` (untrained, or trained by a step that a resume went back behind).
        step: Trainer step; None where it was returned.
        checkpoint: That contains it.
        epoch: Incarnation of the consumer.
    """

    entry: str
    consumer: str
    use_no: int
    revision: int
    state: str
    step: int | None
    checkpoint: str
    epoch: int


class AmendmentFact(msgspec.Struct, frozen=True, kw_only=True):
    """One change by a person, a judge or an environment; `made` names the entry that a reissue made."""

    key: str
    by: str
    patch: Mapping[str, Any]
    outcome: str
    made: str
    at_s: float


class Lineage(msgspec.Struct, frozen=True, kw_only=True):
    """Why an entry is as it is, and what was made of it.

    Attributes:
        row: The entry now.
        task: Its task with its row.
        visit: The how-manieth time the task was drawn, from 0.
        rounds: How often its group was admitted: more than 1 after it was made again; 0 = it took no slot.
        versions: Weights that sampled its tokens, oldest first.
        records: Its sequences, or the one that was asked for.
        children: Entries that were made of it.
    """

    row: EntryRow
    task: Task
    visit: int
    rounds: int
    versions: tuple[VersionFact, ...]
    records: tuple[RecordFact, ...]
    revisions: tuple[RevisionFact, ...]
    amendments: tuple[AmendmentFact, ...]
    uses: tuple[UseFact, ...]
    children: tuple[str, ...]


def why(store: Store, identity: str) -> Lineage:
    """Everything about an entry, a rollout or an experience, by its id; call it inside a transaction.

    Raises:
        ConfigError: The text is no id.
        StoreError: There is no such entry, or no such record in it.
    """
    entry, part = parse_identity(identity)
    store.entries.locate(entry)
    [row] = rows_that_fit(store.db, equals("entry", entry))
    group = read_entry(store, row)
    records = [record for record in group.records if part is None or _is_part(record, part)]
    if not records and part is not None:
        there = ", ".join(str(record.id) for record in group.records if isinstance(record, Experience))
        raise StoreError(f"{identity!r}", "the entry has no such record", there or "the entry's own id", "ask for that")
    id_ = row.group
    rounds = store.db.one(
        "SELECT count(*) FROM admissions WHERE run = ? AND taskset = ? AND task_key = ? AND visit = ?",
        (id_.run, id_.taskset, id_.task_key, id_.visit),
    ) or (0,)
    return Lineage(
        row=row,
        task=group.task,
        visit=id_.visit,
        rounds=rounds[0],
        versions=_versions(store, id_.run, records),
        records=tuple(fact for record in records for fact in _facts(record)),
        revisions=_revisions(store, row.seq),
        amendments=tuple(AmendmentFact(**fields) for fields in amendments_of(store.db, row.seq)),
        uses=uses_where(store, "u.entry = ?", (row.seq,)),
        children=_children(store, row, group),
    )


def used_by(store: Store, consumer: str, step: int) -> tuple[UseFact, ...]:
    """What a step of a run was trained on, in the order of lease; call it inside a transaction.

    Raises:
        StoreError: The run is not in this store, or that step used nothing; says which steps did.
    """
    found = uses_where(store, "u.consumer = ? AND u.step = ? AND u.state != 'returned'", (consumer, step))
    if found:
        return found
    row = store.db.one(
        "SELECT min(step), max(step) FROM uses WHERE consumer = ? AND state != 'returned' AND step IS NOT NULL",
        (consumer,),
    )
    if row is None or row[0] is None:
        runs = ", ".join(str(name) for (name,) in store.db.all("SELECT DISTINCT consumer FROM uses ORDER BY consumer"))
        expected = f"a run that trained: {runs}" if runs else "a run that has trained on this buffer"
        raise StoreError(f"step {step} of run {consumer!r}", "that run used nothing", expected)
    do = "uses of steps that a resume went back behind are returned: see `triune buffer why`"
    raise StoreError(f"step {step} of run {consumer!r}", "it used nothing", f"a step from {row[0]} to {row[1]}", do)


def uses_where(store: Store, condition: str, parameters: Sequence[Any]) -> tuple[UseFact, ...]:
    """Uses that fulfil a condition of ours over `uses u`."""
    rows = store.db.all(
        "SELECT e.entry, u.consumer, u.use_no, u.revision, u.state, u.step, u.checkpoint, u.epoch "
        f"FROM uses u JOIN entries e ON e.seq = u.entry WHERE {condition} ORDER BY u.id",
        parameters,
    )
    return tuple(
        UseFact(
            entry=entry, consumer=consumer, use_no=use_no, revision=revision,
            state=state, step=step, checkpoint=checkpoint or "", epoch=epoch,
        )
        for entry, consumer, use_no, revision, state, step, checkpoint, epoch in rows
    )  # fmt: skip


def parse_identity(identity: str) -> tuple[str, RolloutId | ExperienceId | None]:
    """An entry's name, and what of it is meant: a rollout, an experience, None = all.

    Raises:
        ConfigError: It is none of the three.
    """
    slashes = identity.count("/")
    try:
        if slashes == 3:
            group_of(identity)
            return identity, None
        part = {4: RolloutId, 5: ExperienceId}[slashes].parse(identity)
    except (KeyError, RecordError):
        raise ConfigError(
            f"id {identity!r}",
            "no id of an entry, a rollout or an experience",
            "run/taskset/task_key/visit[/member.attempt[/policy.agent.branch]]",
            "copy one from `triune buffer ls` or `triune buffer show`",
        ) from None
    return str(part.group if isinstance(part, RolloutId) else part.rollout.group), part


def _is_part(record: Record, part: RolloutId | ExperienceId) -> bool:
    ids = [experience.id for experience in experiences_of(record)]
    return any(part in (one, one.rollout) for one in ids)


def _facts(record: Record) -> list[RecordFact]:
    if isinstance(record, Text):
        return [RecordFact(id=record.id, num_tokens=len(record.tokens), tags=tags_of(record))]
    tags = () if isinstance(record, Experience) else tags_of(record)
    return [_fact(half, tags) for half in experiences_of(record)]


def _fact(one: Experience, tags: tuple[str, ...]) -> RecordFact:
    unknown = np.isnan(one.behaviour_logprobs) & one.action_mask
    return RecordFact(
        id=str(one.id),
        reward=one.reward,
        reward_parts=one.reward_parts,
        is_valid=one.is_valid,
        source=str(one.source),
        stop=str(one.stop),
        num_tokens=len(one),
        num_actions=one.num_actions,
        num_unknown=int(unknown.sum()),
        streams=tuple(one.streams),
        parents=one.parents,
        operators=one.operators,
        tags=(*tags, *tags_of(one)),
    )


def _versions(store: Store, run: str, records: Sequence[Record]) -> tuple[VersionFact, ...]:
    counts: Counter[int] = Counter()
    for record in records:
        for one in experiences_of(record):
            versions, numbers = np.unique(one.versions[one.action_mask], return_counts=True)
            counts.update(dict(zip(versions.tolist(), numbers.tolist(), strict=True)))
    found = []
    for version in sorted(counts):
        row = store.db.one(
            "SELECT step, state, digest, epoch FROM versions WHERE run = ? AND version = ?", (run, version)
        )
        known = {} if row is None else dict(zip(("step", "state", "digest", "epoch"), row, strict=True))
        if version >= 0:
            found.append(VersionFact(version=version, num_tokens=counts[version], **known))
    return tuple(found)


def _revisions(store: Store, seq: int) -> tuple[RevisionFact, ...]:
    rows = store.db.all(
        "SELECT r.revision, r.operators, length(r.blob) + coalesce(s.size, 0) FROM revisions r "
        "LEFT JOIN segment_blobs s ON s.entry = r.entry AND s.revision = r.revision "
        "WHERE r.entry = ? ORDER BY r.revision",
        (seq,),
    )
    return tuple(
        RevisionFact(revision=number, operators=tuple(json.loads(names)), num_bytes=size)
        for number, names, size in rows
    )


def _children(store: Store, row: EntryRow, group: Group) -> tuple[str, ...]:
    """What reissues made of it: named by its amendments."""
    made = store.db.all("SELECT made FROM amendments WHERE entry = ? AND made != '' ORDER BY seq", (row.seq,))
    return tuple(name for (name,) in made if name != str(group.id))
