"""Reader of wire version 0: one msgpack map a group, each experience with its own raw arrays. No longer written."""

from __future__ import annotations

from typing import Any

import numpy as np

from triune.records.experience import Experience, Source, Stop
from triune.records.group import Group
from triune.records.ids import ExperienceId, GroupId
from triune.records.task import Task

_DTYPES = {"tokens": "<i4", "action_mask": "?", "logprobs": "<f4", "versions": "<i4", "raw_logprobs": "<f4"}
_PLAIN = ("temperature", "reward", "reward_parts", "is_valid", "priority", "metrics", "info")


def decode_v0(header: dict[str, Any]) -> Group:
    """Turn the decoded header of a version 0 blob into a group; fields it does not know are kept in `unknown`."""
    records = tuple(_read_experience(record) for record in header.pop("records"))
    ident, task, info = GroupId.parse(header.pop("id")), Task(**header.pop("task")), header.pop("info", {})
    return Group(id=ident, task=task, records=records, info=info, unknown=header)


def _read_experience(record: dict[str, Any]) -> Experience:
    arrays: dict[str, Any] = {
        name: np.frombuffer(record.pop(name), dtype) for name, dtype in _DTYPES.items() if name in record
    }
    streams = {name: np.frombuffer(data, "<f4") for name, data in record.pop("streams", {}).items()}
    fields = {name: record.pop(name) for name in _PLAIN if name in record}
    return Experience(
        id=ExperienceId.parse(record.pop("id")),
        stop=Stop(record.pop("stop", "done")),
        source=Source(record.pop("source", "policy")),
        streams=streams,
        **fields,
        **arrays,
        unknown=record,
    )
