"""Binary encoding of groups: one blob a group, no pickle, safe to read from strangers.

    0   magic `TRIU`            8   crc32 of everything else
    4   major version, u8       12  header size in bytes
    5   minor version, u8       16  header (msgpack), filled up to 8 bytes
    6   zero                    …   columns (see `columns.py`)

The header holds everything that is no array, by field name, defaults left out. A new field raises the minor version:
older readers keep what they do not know in `unknown` and write it again. A changed meaning raises the major version,
and this reader still reads the previous one (`wire_v0.py`).
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator, Mapping
from itertools import chain
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from triune.errors import RecordError, WireError
from triune.records.columns import ColumnWriter, Joined, read_columns
from triune.records.experience import Experience, Media, Source, Stop, Turn
from triune.records.group import Group, Pair, Record, Text
from triune.records.ids import ExperienceId, GroupId, RolloutId
from triune.records.task import Task
from triune.records.wire_plain import read_plain
from triune.records.wire_v0 import decode_v0

WIRE_VERSION = 1
"""Major version that `encode_group` writes; `decode_group` also reads the one before."""

WIRE_MINOR = 0
"""Raised with every added field."""

_MAGIC = b"TRIU"
_PREFIX = struct.Struct("<4sBBHII")
_START = _PREFIX.pack(_MAGIC, WIRE_VERSION, WIRE_MINOR, 0, 0, 0)[:8]
_START_CRC = zlib.crc32(_START)
_FILL = [bytes(count) for count in range(8)]
_STOPS = {stop.value: stop for stop in Stop}
_SOURCES = {source.value: source for source in Source}
_HEADER_OF = attrgetter(
    *("id.rollout.member", "id.rollout.attempt", "id.branch", "id.policy", "id.agent"),
    *("reward", "temperature", "is_valid", "priority", "stop", "source"),
    *("reward_parts", "metrics", "info", "messages", "tools", "parents", "operators", "turns", "media"),
)
_TUPLES = ("messages", "tools", "parents", "operators")
_ITEMS = {"turns": (Turn, frozenset(Turn.__struct_fields__)), "media": (Media, frozenset(Media.__struct_fields__))}
_FIELDS = frozenset(Experience.__struct_fields__)


def _plain_number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain_number)
_decoder = msgspec.msgpack.Decoder()


# ----------------------------------------------------------------------------------------------- writing


def encode_group(group: Group, joined: Joined | None = None) -> bytes:
    """Write a group as one blob.

    A reward of NaN is written as None: what is not known is never a number. `joined` saves work: the arrays of a group
    of nothing but its own experiences without unknown fields, where a check has put all of them together.

    Raises:
        RecordError: A field holds something that is no JSON-like value (the type is named).
    """
    sequences: list[Experience | Text] = []
    if joined is not None:
        records = list(map(_known_header, group.experiences))
        columns = ColumnWriter(len(records))
        for name, array in joined.columns.items():
            columns.add_joined(name, array)
    else:
        records = [_record_header(record, group.id, sequences) for record in group.records]
        columns = ColumnWriter(len(sequences))
        if sequences:
            _write_columns(columns, sequences)
    header: dict[str, Any] = {
        **group.unknown,
        "id": [group.id.run, group.id.taskset, group.id.task_key, group.id.visit],
        "task": _task_header(group.task, group.unknown.get("task", {})),
        "records": records,
        "lengths": [len(sequence.tokens) for sequence in sequences] if joined is None else joined.lengths,
        "columns": columns.descriptions,
    }
    if group.info:
        header["info"] = group.info
    try:
        head = _encoder.encode(header)
    except (TypeError, ValueError, OverflowError) as error:
        do = "keep plain values in `info` and `data`"
        raise RecordError(
            str(group.id), f"not a JSON-like value: {error}", "text, numbers, lists and mappings", do
        ) from error
    front = b"".join((len(head).to_bytes(4, "little"), head, _FILL[-len(head) % 8]))
    crc = zlib.crc32(front, _START_CRC)
    for chunk in columns.chunks:
        crc = zlib.crc32(chunk, crc)
    return b"".join((_START, crc.to_bytes(4, "little"), front, *columns.chunks))


def check_plain(value: Any, where: str) -> None:
    """Raise RecordError where a value is none that `encode_group` writes (the type is named); changes nothing."""
    try:
        _encoder.encode(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise RecordError(where, f"not a JSON-like value: {error}", "text, numbers, lists and mappings") from error


def _record_header(record: Record, group: GroupId, sequences: list[Experience | Text]) -> dict[str, Any]:
    if isinstance(record, Experience):
        sequences.append(record)
        return _experience_header(record, group)
    if isinstance(record, Text):
        sequences.append(record)
        return {**_not_arrays(record.unknown), "kind": "text", "id": record.id, "info": record.info}
    sequences += (record.chosen, record.rejected)
    return {
        **record.unknown,
        "kind": "pair",
        "chosen": _experience_header(record.chosen, group),
        "rejected": _experience_header(record.rejected, group),
        "weight": record.weight,
        "margin": record.margin,
        "by": record.by,
        "info": record.info,
    }


def _experience_header(experience: Experience, group: GroupId) -> dict[str, Any]:
    unknown, rollout = experience.unknown, experience.id.rollout
    known = _known_header(experience)
    if rollout.group is not group and rollout.group != group:
        known["id"].append(str(rollout.group))
    if not unknown:
        return known
    header = {**_not_arrays(unknown), **known}
    for name in _ITEMS:
        if name in known:
            header[name] = _with_extras(known[name], unknown.get(name))
        else:
            header.pop(name, None)  # unknown fields of items that an operator took away
    return header


def _known_header(experience: Experience) -> dict[str, Any]:
    """Everything that is no array, without defaults."""
    (
        *ids, reward, temperature, is_valid, priority, stop, source, parts, metrics, info, messages, tools, parents,
        operators, turns, media,
    ) = _HEADER_OF(experience)  # fmt: skip
    header: dict[str, Any] = {"id": ids}
    if reward is not None and reward == reward:
        header["reward"] = reward
    if not isinstance(temperature, np.ndarray) and temperature != 1.0:
        header["temperature"] = float(temperature)
    if not is_valid:
        header["is_valid"] = False
    if priority:
        header["priority"] = priority
    header["stop"], header["source"] = stop, source
    if parts:
        header["reward_parts"] = parts
    if metrics:
        header["metrics"] = metrics
    if info:
        header["info"] = info
    if messages:
        header["messages"] = messages
    if tools:
        header["tools"] = tools
    if parents:
        header["parents"] = parents
    if operators:
        header["operators"] = operators
    if turns:
        header["turns"] = turns
    if media:
        header["media"] = media
    return header


def _with_extras(items: tuple[Any, ...], extras: Any) -> Any:
    """Structs as they are, or merged with the unknown fields their blob had (as long as their number is the same)."""
    if not isinstance(extras, list | tuple) or len(extras) != len(items):
        return items
    return [{**extra, **msgspec.to_builtins(item)} for item, extra in zip(items, extras, strict=True)]


def _task_header(task: Task, extras: Mapping[str, Any]) -> dict[str, Any]:
    header = {**extras, "key": task.key, "taskset": task.taskset, "data": task.data}
    for name in ("workflow", "reward", "info"):
        value = getattr(task, name)
        if value:
            header[name] = value
    return header


def _not_arrays(unknown: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in unknown.items() if not isinstance(value, np.ndarray)}


def _write_columns(columns: ColumnWriter, sequences: list[Experience | Text]) -> None:
    columns.add("tokens", [sequence.tokens for sequence in sequences])
    rows = [row for row, sequence in enumerate(sequences) if isinstance(sequence, Experience)]
    if rows:
        experiences: list[Any] = [sequences[row] for row in rows]
        for name in ("action_mask", "logprobs", "versions"):
            columns.add(name, [getattr(experience, name) for experience in experiences], rows)
    columns.add_mixed(_optional_arrays(sequences))


def _optional_arrays(sequences: list[Experience | Text]) -> Iterator[tuple[int, str, np.ndarray]]:
    for row, sequence in enumerate(sequences):
        if isinstance(sequence, Experience):
            if sequence.raw_logprobs is not None:
                yield row, "raw_logprobs", sequence.raw_logprobs
            if isinstance(sequence.temperature, np.ndarray):
                yield row, "temperature", sequence.temperature
            for name, array in sequence.streams.items():
                yield row, f"streams.{name}", array
        for name, value in sequence.unknown.items():
            if isinstance(value, np.ndarray):
                yield row, name, value


# ----------------------------------------------------------------------------------------------- reading


def decode_group(blob: bytes) -> Group:
    """Read a blob; arrays are read-only views of it.

    Raises:
        WireError: Not one of our blobs, truncated, changed on the way, or of a major version this reader does not know.
    """
    view = memoryview(blob)
    if len(view) < _PREFIX.size or view[:4] != _MAGIC:
        raise WireError(
            "wire", f"{len(view)} bytes that begin with {bytes(view[:4])!r}", repr(_MAGIC), "is it a Triune record?"
        )
    _, major, minor, _, crc, size = _PREFIX.unpack_from(view)
    if major not in (WIRE_VERSION, WIRE_VERSION - 1):
        do = "upgrade triune" if major > WIRE_VERSION else "export it with the release that wrote it"
        raise WireError("wire", f"version {major}.{minor}", f"{WIRE_VERSION - 1} or {WIRE_VERSION}", do)
    if zlib.crc32(view[12:], zlib.crc32(view[:8])) != crc:
        raise WireError(
            "wire", "the checksum differs", "the bytes that were written", "the blob is truncated or corrupt"
        )
    head, data = view[_PREFIX.size : _PREFIX.size + size], view[_PREFIX.size + size + -size % 8 :]
    try:
        group = read_plain(head, data) if major else None
        if group is not None:
            return group
        header = _decoder.decode(head)
        return decode_v0(header) if major == 0 else _read_group(header, data)
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, msgspec.MsgspecError) as error:
        raise WireError("wire", f"{type(error).__name__}: {error}", "a record of version 0 or 1") from error


def _read_group(header: dict[str, Any], data: memoryview) -> Group:
    group = GroupId(*header.pop("id"))
    task, task_extras = _read_task(header.pop("task"))
    arrays = iter(read_columns(data, header.pop("columns"), header.pop("lengths")))
    records = tuple(_read_record(record, group, arrays) for record in header.pop("records"))
    info = header.pop("info", {})
    if task_extras:
        header["task"] = task_extras
    return Group(id=group, task=task, records=records, info=info, unknown=header)


def _read_task(header: dict[str, Any]) -> tuple[Task, dict[str, Any]]:
    known = {name: header.pop(name) for name in Task.__struct_fields__ if name in header}
    return Task(**known), header


def _read_record(header: dict[str, Any], group: GroupId, arrays: Iterator[dict[str, Any]]) -> Record:
    kind = header.pop("kind", None)
    if kind is None:
        return _read_experience(header, group, next(arrays))
    if kind == "text":
        columns = next(arrays)
        tokens = columns.pop("tokens")
        return Text(id=header.pop("id"), tokens=tokens, info=header.pop("info"), unknown={**header, **columns})
    if kind == "pair":
        chosen = _read_experience(header.pop("chosen"), group, next(arrays))
        rejected = _read_experience(header.pop("rejected"), group, next(arrays))
        known = {name: header.pop(name) for name in ("weight", "margin", "by", "info") if name in header}
        return Pair(chosen=chosen, rejected=rejected, **known, unknown=header)
    raise WireError("wire", f"a record of kind {kind!r}", "experience, pair or text", "upgrade triune")


def _read_experience(fields: dict[str, Any], group: GroupId, arrays: dict[str, Any]) -> Experience:
    """`fields` and `arrays` belong to this call: they are changed in place."""
    member, attempt, branch, policy, agent, *other = fields["id"]
    rollout = RolloutId(GroupId.parse(other[0]) if other else group, member, attempt)
    fields["id"] = ExperienceId(rollout, branch, policy, agent)
    fields["stop"], fields["source"] = _STOPS[fields["stop"]], _SOURCES[fields["source"]]
    fields["unknown"] = {}
    for name in _TUPLES:
        if name in fields:
            fields[name] = tuple(fields[name])
    for name in _ITEMS:
        if name in fields:
            fields[name] = _read_items(name, fields[name], fields["unknown"])
    for mapping in (fields, arrays):
        if not _FIELDS.issuperset(mapping):
            for name in mapping.keys() - _FIELDS:
                fields["unknown"][name] = mapping.pop(name)
    fields.update(arrays)
    return Experience(**fields)


def _read_items(name: str, items: list[dict[str, Any]], unknown: dict[str, Any]) -> tuple[Any, ...]:
    kind, known = _ITEMS[name]
    if not known.issuperset(chain.from_iterable(items)):
        unknown[name] = [{extra: item.pop(extra) for extra in item.keys() - known} for item in items]
    if kind is Turn:
        for item in items:
            item["stop_reason"] = _STOPS[item["stop_reason"]]
    return tuple([kind(**item) for item in items])


# ------------------------------------------------------------------------------------------------ hashing


def content_hash(experience: Experience) -> str:
    """128-bit hex hash of tokens and action mask: equal for the same sequence, whoever made it and whatever it earned.

    It finds duplicates; it never identifies (ids do).
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(np.ascontiguousarray(experience.tokens, dtype="<i4").tobytes())
    digest.update(np.packbits(experience.action_mask).tobytes())
    return digest.hexdigest()
