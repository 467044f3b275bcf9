"""Reads the usual blob quickly: a group of experiences in which every field is one that this reader knows.

The header is decoded in one typed pass, which stops at anything else: an unknown field, a pair, a text, an experience
of another group, pictures. `wire.py` then reads it field by field. Both ways lead to the same group.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from triune.records.columns import Description, read_column
from triune.records.experience import Experience, Source, Stop, Turn
from triune.records.group import Group
from triune.records.ids import ExperienceId, GroupId, RolloutId
from triune.records.task import Task

_MAIN = ["tokens", "action_mask", "logprobs", "versions"]
_STREAMS = "streams."

_Plain = dict[str, Any]
_Number = int | float


class _Known(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Decodes to nothing else than these fields."""


class _Task(_Known, frozen=True):
    key: str
    taskset: str
    data: _Plain
    workflow: _Plain | None = None
    reward: _Plain | None = None
    info: _Plain = {}


class _Turn(_Known, frozen=True):
    start: int
    stop: int
    stop_reason: Stop
    reward: _Number | None = None
    state_key: str | None = None


class _Experience(_Known, frozen=True):
    id: tuple[int, int, int, str, str]
    stop: Stop
    source: Source
    reward: _Number | None = None
    temperature: _Number = 1.0
    is_valid: bool = True
    priority: _Number = 0.0
    reward_parts: _Plain = {}
    metrics: _Plain = {}
    info: _Plain = {}
    messages: tuple[Any, ...] = ()
    tools: tuple[Any, ...] = ()
    parents: tuple[Any, ...] = ()
    operators: tuple[Any, ...] = ()
    turns: tuple[_Turn, ...] = ()


class _Header(_Known, frozen=True):
    id: tuple[str, str, str, int]
    task: _Task
    records: list[_Experience]
    lengths: list[int]
    columns: list[Description]
    info: _Plain = {}


_decoder = msgspec.msgpack.Decoder(_Header)


def read_plain(head: memoryview, data: memoryview) -> Group | None:
    """The group; None when something about it is not usual.

    Raises:
        WireError: A column does not lie inside the data, or is not as long as its sequences.
        ValueError: Likewise.
    """
    try:
        header = _decoder.decode(head)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    names = [description[0] for description in header.columns]
    if names[:4] != _MAIN or any(description[3] is not None for description in header.columns):
        return None
    streams = [name.removeprefix(_STREAMS) for name in names[4:]]
    if [_STREAMS + name for name in streams] != names[4:]:
        return None
    rows = zip(*_cut_columns(header, data), strict=True)
    group = GroupId(*header.id)
    records = [_experience(each, group, row, streams) for each, row in zip(header.records, rows, strict=True)]
    return Group(id=group, task=_task(header.task), records=tuple(records), info=header.info)


def _cut_columns(header: _Header, data: memoryview) -> list[list[np.ndarray]]:
    """Every column as the arrays of its sequences."""
    ends, total = [0], 0
    for length in header.lengths:
        total += length
        ends.append(total)
    spans = list(pairwise(ends))
    columns = [read_column(data, description, total) for description in header.columns]
    return [[column[start:stop] for start, stop in spans] for column in columns]


def _task(task: _Task) -> Task:
    return Task(
        key=task.key, data=task.data, taskset=task.taskset, workflow=task.workflow, reward=task.reward, info=task.info
    )


def _experience(head: _Experience, group: GroupId, arrays: tuple[np.ndarray, ...], streams: list[str]) -> Experience:
    member, attempt, branch, policy, agent = head.id
    tokens, action_mask, logprobs, versions, *rest = arrays
    return Experience(
        id=ExperienceId(RolloutId(group, member, attempt), branch, policy, agent),
        tokens=tokens,
        action_mask=action_mask,
        logprobs=logprobs,
        versions=versions,
        temperature=head.temperature,
        streams=dict(zip(streams, rest, strict=True)),
        turns=tuple(
            [
                Turn(start=t.start, stop=t.stop, reward=t.reward, state_key=t.state_key, stop_reason=t.stop_reason)
                for t in head.turns
            ]
        ),
        reward=head.reward,
        reward_parts=head.reward_parts,
        is_valid=head.is_valid,
        stop=head.stop,
        source=head.source,
        parents=head.parents,
        operators=head.operators,
        priority=head.priority,
        metrics=head.metrics,
        info=head.info,
        messages=head.messages,
        tools=head.tools,
    )
