"""Fields of a row: nested paths, mapping to Triune's names, and what to say when one is missing."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from triune.errors import RewardError, TaskError
from triune.records import Task

_MISSING = object()


def read_path(row: Mapping[str, Any], path: str, where: Callable[[], str]) -> Any:
    """The value at `path`: a field's own name first, then a dotted path into nested mappings.

    Raises:
        TaskError: No such field; proposes the nearest one.
    """
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        value = value.get(part, _MISSING) if isinstance(value, Mapping) else _MISSING
        if value is _MISSING:
            raise TaskError(where(), f"the row has no field {path!r}", "", _did_you_mean(path, row))
    return value


def map_fields(row: Mapping[str, Any], mapping: Mapping[str, str], where: Callable[[], str]) -> dict[str, Any]:
    """Copy of `row` in which `mapping` (our name → the row's name or dotted path) has been applied.

    A renamed field loses its old name; the other fields stay as they are.

    Raises:
        TaskError: The row lacks a field that is mapped.
    """
    if not mapping:
        return dict(row)
    taken = {name: read_path(row, path, where) for name, path in mapping.items()}
    kept = dict(row)
    for path in mapping.values():
        kept.pop(path, None)
    return kept | taken


def truth_of(task: Task, key: str, reward: str) -> str:
    """The reference answer a reward compares with, as text.

    Raises:
        RewardError: The task's data has no such field, or it is empty.
    """
    value = task.data.get(key)
    if value is None:
        where = f"{reward} on task {task.taskset}/{task.key}"
        found = f"its data has no field {key!r}" if key not in task.data else f"its field {key!r} is null"
        raise RewardError(where, found, "the reference answer", _did_you_mean(key, task.data))
    return value if type(value) is str else str(value)


def _did_you_mean(name: str, row: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, [str(key) for key in row], n=1)
    if near:
        return f"did you mean {near[0]!r}? (map it with `fields: {{…}}`)"
    return f"it has {', '.join(map(str, row)) or 'no fields'}; map one with `fields: {{{name}: …}}`"
