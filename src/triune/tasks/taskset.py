"""A task set: where rows come from, and how a row becomes a task."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

import msgspec
from pydantic import Field

from triune.errors import TaskError
from triune.records import Task
from triune.registry import brick_field
from triune.tasks.fields import map_fields, read_path

_json = msgspec.json.Encoder(order="sorted")


class Rows(Protocol):
    """The rows of an opened task set, by number.

    Attributes:
        size: How many there are; None = endless.
        content_hash: Hash over all of them, or over what generates them.
        has_keys: Row i is known as `str(i)` for ever, because it is generated from its number.
        block: How many rows are cheap to read at once without stalling the event loop.
    """

    size: int | None
    content_hash: str
    has_keys: bool
    block: int

    def read(self, numbers: Sequence[int]) -> list[Mapping[str, Any]]:
        """Rows by number, before field mapping."""
        ...

    def place(self, number: int) -> str:
        """Where a row stands, for messages: `file.jsonl:12`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Taskset(ABC):
    """What every task set has; a kind of its own adds where the rows come from.

    Attributes:
        name: Stands in ids, metrics and messages; default `train` (under `eval:` `eval`), numbered if several.
        weight: Share of the tasks drawn from this set, relative to the others'.
        workflow: Workflow of its tasks, unless a row names another.
        reward: Reward of its tasks, unless a row names another.
        fields: Our field name → the row's name or dotted path, e.g. `{question: problem, answer: solution}`.
            `id`, `workflow` and `reward` may be mapped too: they choose the key and the bricks of a single row.
        limit: Use only the first so many rows.
    """

    name: str = ""
    weight: Annotated[float, Field(gt=0)] = 1.0
    workflow: Any = brick_field("workflow", None)
    reward: Any = brick_field("reward", None)
    fields: dict[str, str] = field(default_factory=dict)
    limit: Annotated[int, Field(ge=1)] | None = None

    @abstractmethod
    def open(self, seed: int, where: str) -> Rows:
        """Read or prepare the rows.

        Args:
            seed: For generators; differs between differently named sets of a run.
            where: Dotted key for messages.

        Raises:
            TaskError: Missing, empty or malformed.
        """

    def known_fields(self) -> frozenset[str] | None:
        """Names that a row's fields have after mapping, read from its first row; None where that is not cheap to know.

        Raises nothing: what is missing or malformed is an error when the rows are opened.
        """
        first = self._first_fields()
        return None if first is None else first - frozenset(self.fields.values()) | self.fields.keys()

    def _first_fields(self) -> frozenset[str] | None:
        return None


class OpenTaskset:
    """An opened task set: makes tasks of its rows, and finds them again by key.

    The key of a task is the row's number where rows are generated, else its field `id` where it has one, else a hash
    of its data: a content hash dedupes nothing here, equal rows simply share a key.
    """

    def __init__(self, settings: Taskset, name: str, *, seed: int = 0, where: str = "tasks") -> None:
        self.settings, self.name, self.where = settings, name, where
        self._rows = settings.open(seed, where)
        size, limit = self._rows.size, settings.limit
        self.size: int | None = limit if size is None else size if limit is None else min(size, limit)
        if self.size == 0:
            raise TaskError(
                f"{where} ({name})", "the task set is empty", "at least one row", "check its path and limit"
            )
        self.block = self._rows.block
        self._numbers: dict[str, int] | None = None
        self.tasks([0])  # a wrong mapping is an error now, not in the first rollout

    @property
    def data_hash(self) -> str:
        """Hash over rows, mapping and limit: equal hashes mean equal tasks under equal keys."""
        parts = [self.name, self._rows.content_hash, self.settings.fields, self.size]
        return hashlib.blake2b(_json.encode(parts), digest_size=16).hexdigest()

    def tasks(self, numbers: Sequence[int]) -> list[Task]:
        """Tasks of the rows with these numbers.

        Raises:
            TaskError: A row lacks a mapped field.
        """
        rows = self._rows.read(numbers)
        return [self._task(number, row) for number, row in zip(numbers, rows, strict=True)]

    def all(self, limit: int | None = None) -> Iterator[Task]:
        """Every task once, in the order of the rows; the first `limit`, where given.

        Raises:
            TaskError: The set is endless, and there is no limit.
        """
        end = limit if self.size is None else self.size if limit is None else min(self.size, limit)
        if end is None:
            raise TaskError(f"{self.where} ({self.name})", "the task set is endless", "a number", "give it a `limit`")
        for start in range(0, end, self.block):
            yield from self.tasks(range(start, min(start + self.block, end)))

    def find(self, key: str) -> Task | None:
        """The task with this key, or None."""
        if self._rows.has_keys:
            number = int(key) if key.isdecimal() else -1
            known = number >= 0 and (self.size is None or number < self.size)
            return self.tasks([number])[0] if known else None
        if self._numbers is None:
            self._numbers = {task.key: number for number, task in reversed(list(enumerate(self.all())))}
        number = self._numbers.get(key, -1)
        return self.tasks([number])[0] if number >= 0 else None

    def _task(self, number: int, row: Mapping[str, Any]) -> Task:
        mapping = self.settings.fields
        data = map_fields(row, mapping, lambda: self._rows.place(number)) if mapping else row
        workflow = self._spec(data, "workflow", number) if "workflow" in mapping else None
        reward = self._spec(data, "reward", number) if "reward" in mapping else None
        return Task(key=self._key(number, data), data=data, taskset=self.name, workflow=workflow, reward=reward)

    def _key(self, number: int, data: Mapping[str, Any]) -> str:
        if self._rows.has_keys:
            return str(number)
        identity = data.get("id")
        if identity is not None:
            return str(identity)
        return hashlib.blake2b(_json.encode(data), digest_size=8).hexdigest()

    def _spec(self, data: Mapping[str, Any], kind: str, number: int) -> Mapping[str, Any] | None:
        value = read_path(data, kind, lambda: self._rows.place(number))
        if value is None or value == "":
            return None
        if isinstance(value, str):
            return {"use": value}
        if isinstance(value, Mapping) and "use" in value:
            return value
        raise TaskError(self._rows.place(number), f"{kind} is {value!r}", f"the name of a {kind}, or {{use: NAME, …}}")


def check_unique_ids(numbered: Iterable[tuple[int, Any]], rows: Rows) -> None:
    """Raise TaskError when two rows carry the same id: a group could not be told to which of them it belongs."""
    seen: dict[str, int] = {}
    for number, identity in numbered:
        if identity is None:
            continue
        first = seen.setdefault(str(identity), number)
        if first != number:
            found = f"id {identity!r} is already that of {rows.place(first)}"
            raise TaskError(rows.place(number), found, "ids that are unique in the task set")
