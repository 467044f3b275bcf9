"""What a filter may speak of: documented columns of an entry, in SQL where the store has them, else read from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from triune.ports import EntryState
from triune.records import Experience, Group, GroupId, Pair, Record, Source

Kind = Literal["text", "number", "flag", "many", "any"]


class EntryRow(msgspec.Struct, frozen=True, kw_only=True):
    """One entry without its records.

    Attributes:
        seq: Order in which it was stored.
        entry: Its id, `run/taskset/task_key/visit`; with `~` and a number once its group was made again.
        scope: The only run that may lease it; "" = every run.
        reward: Mean over its rollouts; None = not known, or none.
        urgent: Whether a person made one of its records.
        version: Oldest version that sampled one of its tokens; -1 = no policy did.
        staleness: Published steps of its run since `version`; 0 where no policy sampled it.
        age_s: Seconds since it was stored.
        uses: Acknowledged uses, of all runs.
        leased: Uses that are leased now.
    """

    seq: int
    entry: str
    buffer: str
    scope: str
    state: str
    reason: str
    source: str
    reward: float | None
    priority: float
    urgent: bool
    num_records: int
    version: int
    newest_version: int
    revision: int
    epoch: int
    staleness: int
    age_s: float
    uses: int
    leased: int

    @property
    def group(self) -> GroupId:
        """Run, task set, task key and visit."""
        return group_of(self.entry)


def group_of(entry: str) -> GroupId:
    """The group that an entry's name says; one whose group was made again has `~` and a number behind it.

    Raises:
        RecordError: It is no name of an entry.
    """
    head, slash, visit = entry.rpartition("/")
    return GroupId.parse(head + slash + visit.partition("~")[0])


_LINE = "(SELECT r.line FROM runs r WHERE r.run = e.scope)"
_LINE_OF_VERSION = (
    "(SELECT v.line FROM versions v WHERE v.run = e.scope AND v.state = 'committed' "
    "AND v.version <= e.oldest_version ORDER BY v.version DESC LIMIT 1)"
)
STALENESS = (
    f"(CASE WHEN e.oldest_version < 0 OR coalesce({_LINE}, -1) < 0 THEN 0 "
    f"ELSE {_LINE} - coalesce({_LINE_OF_VERSION}, -1) END)"
)
_USES = "(SELECT count(*) FROM uses u WHERE u.entry = e.seq AND u.state = '{}')"


class Column(NamedTuple):
    """One word of a filter.

    Attributes:
        name: As it is written.
        kind: What it is compared with; `many` holds several texts, and one that fits is enough.
        about: For the documentation.
        sql: Its expression over `entries e`; "" = found in the entry's name or records.
        field: Of `EntryRow`, where it is one.
        choices: All values, where they are few.
    """

    name: str
    kind: Kind
    about: str
    sql: str = ""
    field: str = ""
    choices: tuple[str, ...] = ()


_ALL = (
    Column("entry", "text", "id: `run/taskset/task_key/visit`", "e.entry", "entry"),
    Column("run", "text", "the run that made it"),
    Column("taskset", "text", "name of the task set"),
    Column("task_key", "text", "the task's identity in its set"),
    Column("buffer", "text", "named buffer", "e.buffer", "buffer"),
    Column("scope", "text", "the only run that may lease it; '' = every run", "e.scope", "scope"),
    Column("state", "text", "waiting, raw, ready, spent, …", "e.state", "state", tuple(EntryState)),
    Column("reason", "text", "why it was dropped, expired or evicted", "e.reason", "reason"),
    Column("source", "text", "who made it: policy, expert, human, …", "e.source", "source", tuple(Source)),
    Column("reward", "number", "mean over its rollouts; NULL = not known", "e.reward", "reward"),
    Column("priority", "number", "stored priority", "e.score", "priority"),
    Column("urgent", "flag", "whether a person made one of its records", "e.class", "urgent"),
    Column("num_records", "number", "sequences, pairs or texts", "e.num_records", "num_records"),
    Column("version", "number", "oldest weights that sampled it; -1 = no policy did", "e.oldest_version", "version"),
    Column("newest_version", "number", "newest weights that sampled it", "e.newest_version", "newest_version"),
    Column("revision", "number", "its newest revision; 0 = as it was put", "e.revision", "revision"),
    Column("epoch", "number", "incarnation of the run that put it", "e.epoch", "epoch"),
    Column("staleness", "number", "published steps of its run since `version`", STALENESS, "staleness"),
    Column("age", "number", "seconds since it was stored; `90s`, `15m`, `2h`, `7d`", "(:now - e.created)", "age_s"),
    Column("uses", "number", "steps that were trained on it", _USES.format("acked"), "uses"),
    Column("leased", "number", "uses that are leased now", _USES.format("leased"), "leased"),
    Column("tags", "many", "tags of its records"),
    Column("operators", "many", "operators that touched its records"),
    Column("stop", "many", "how its rollouts ended: done, length, timeout, …"),
    Column("num_tokens", "number", "tokens of all its sequences"),
)
COLUMNS: Mapping[str, Column] = {column.name: column for column in _ALL}
"""Every column but `data.NAME`, the fields of the task's row."""

DATA = "data."
"""Beginning of a column that is a field of the task's row, dots for nested ones."""

FROM_NAME = ("run", "taskset", "task_key")
"""Columns that the entry's name holds, so that its records need not be read."""

SELECTED = (
    "e.seq, e.entry, e.buffer, e.scope, e.state, e.reason, e.source, e.reward, e.score, e.class, e.num_records, "
    "e.oldest_version, e.newest_version, e.revision, e.epoch, "
    f"{STALENESS}, :now - e.created, {_USES.format('acked')}, {_USES.format('leased')}"
)
"""The select list that `make_row` reads; needs `:now`."""


def make_row(values: Iterable[Any]) -> EntryRow:
    """One row of a query over `SELECTED`."""
    fields = dict(zip(EntryRow.__struct_fields__, values, strict=True))
    return EntryRow(**{**fields, "urgent": bool(fields["urgent"])})


def value_of(name: str, row: EntryRow, group: Group | None) -> Any:
    """A column's value; None = NULL. `group` is needed where the row does not hold it."""
    column = COLUMNS.get(name)
    if column is not None and column.field:
        return getattr(row, column.field)
    if name in FROM_NAME:
        return getattr(row.group, name)
    assert group is not None, "callers read the entry where `Filter.decide` says None"
    if name.startswith(DATA):
        return _dig(group.task.data, name.removeprefix(DATA))
    if name == "num_tokens":
        return sum(len(tokens) for record in group.records for tokens in _tokens_of(record))
    read = {"tags": tags_of, "operators": lambda r: getattr(r, "operators", ()), "stop": _stops_of}[name]
    return tuple(dict.fromkeys(text for record in group.records for text in read(record)))


def tags_of(record: Record) -> tuple[str, ...]:
    """What an import or a person called a record."""
    found = record.info.get("tags", ())
    return tuple(str(tag) for tag in found) if isinstance(found, list | tuple) else (str(found),)


def experiences_of(record: Record) -> tuple[Experience, ...]:
    """An experience, or both halves of a pair; none of a text."""
    if isinstance(record, Experience):
        return (record,)
    return (record.chosen, record.rejected) if isinstance(record, Pair) else ()


def _tokens_of(record: Record) -> list[Any]:
    return [part.tokens for part in experiences_of(record)] or [getattr(record, "tokens", ())]


def _stops_of(record: Record) -> tuple[str, ...]:
    return tuple(str(part.stop) for part in experiences_of(record))


def _dig(data: Mapping[str, Any], path: str) -> Any:
    """`a.b` of nested mappings; a name that itself has dots wins."""
    if path in data:
        return data[path]
    first, _, rest = path.partition(".")
    inner = data.get(first)
    return _dig(inner, rest) if rest and isinstance(inner, Mapping) else None
