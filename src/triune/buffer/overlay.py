"""Revisions as overlays: only what an operator or a person changed, on top of the raw group's immutable blob."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter, is_
from typing import Any

import msgspec
import numpy as np

from triune.errors import RecordError, WireError
from triune.records import Experience, Group, Source, Stop, Turn

ARRAYS = ("tokens", "action_mask", "logprobs", "versions", "raw_logprobs")
PLAIN = (
    "reward",
    "reward_parts",
    "is_valid",
    "operators",
    "priority",
    "metrics",
    "info",
    "turns",
    "stop",
    "source",
    "parents",
)
KEPT = ("messages", "tools", "media", "unknown", "temperature")
"""Fields an overlay does not carry: when one of them differs, the revision is stored whole."""

_ARRAYS, _PLAIN, _KEPT, _ID = attrgetter(*ARRAYS), attrgetter(*PLAIN), attrgetter(*KEPT), attrgetter("id")


class _Array(msgspec.Struct, array_like=True, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _Changes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What differs from one raw experience; UNSET = nothing."""

    row: int
    reward: float | msgspec.UnsetType | None = msgspec.UNSET
    reward_parts: dict[str, float] | msgspec.UnsetType = msgspec.UNSET
    is_valid: bool | msgspec.UnsetType = msgspec.UNSET
    operators: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    priority: float | msgspec.UnsetType = msgspec.UNSET
    metrics: dict[str, float] | msgspec.UnsetType = msgspec.UNSET
    info: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    turns: tuple[Turn, ...] | msgspec.UnsetType = msgspec.UNSET
    stop: Stop | msgspec.UnsetType = msgspec.UNSET
    source: Source | msgspec.UnsetType = msgspec.UNSET
    parents: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    arrays: dict[str, _Array | None] = {}
    streams: dict[str, _Array | None] = {}


class _Overlay(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    records: list[_Changes]
    info: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


def _plain_number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain_number)
_decoder = msgspec.msgpack.Decoder(_Overlay)


def encode_overlay(raw: Group, shaped: Group) -> bytes | None:
    """What `shaped` changes in `raw`; None when it cannot be said so (then the group is stored whole).

    Raises:
        RecordError: A field holds something that is no JSON-like value.
    """
    if (
        shaped.id != raw.id
        or shaped.unknown != raw.unknown
        or (shaped.task is not raw.task and shaped.task != raw.task)
    ):
        return None
    bases, rows = _experiences(raw), _experiences(shaped)
    numbers = _numbers(bases, rows)
    if numbers is None:
        return None
    records = []
    for number, row in zip(numbers, rows, strict=True):
        base = bases[number]
        for one, other in zip(_KEPT(row), _KEPT(base), strict=True):
            if one is not other and (isinstance(one, np.ndarray) or isinstance(other, np.ndarray) or one != other):
                return None
        records.append(_changes(number, base, row))
    info = msgspec.UNSET if shaped.info is raw.info or shaped.info == raw.info else dict(shaped.info)
    try:
        return _encoder.encode(_Overlay(records=records, info=info))
    except (TypeError, ValueError, OverflowError) as error:
        do = "operators keep plain values in `info` and `metrics`"
        raise RecordError(
            str(raw.id), f"not a JSON-like value: {error}", "text, numbers, lists and mappings", do
        ) from error


def _experiences(group: Group) -> Sequence[Experience]:
    """The records, when all are experiences; else none."""
    records: Any = group.records
    return records if all(isinstance(record, Experience) for record in records) else ()


def _numbers(bases: Sequence[Experience], rows: Sequence[Experience]) -> Sequence[int] | None:
    """For each row the number of the raw one it is made from, by id; None when one has none."""
    if len(bases) == len(rows) and all(map(is_, map(_ID, bases), map(_ID, rows))):
        return range(len(rows)) if rows else None
    number_of = {base.id: number for number, base in enumerate(bases)}
    numbers = [number_of.get(row.id, -1) for row in rows]
    return None if -1 in numbers or not rows else numbers


def _changes(row: int, base: Experience, record: Experience) -> _Changes:
    fields: dict[str, Any] = {}
    for name, one, other in zip(PLAIN, _PLAIN(record), _PLAIN(base), strict=True):
        if one is not other and one != other:
            fields[name] = one
    now, before = _ARRAYS(record), _ARRAYS(base)
    if not all(map(is_, now, before)):
        changed = zip(ARRAYS, now, before, strict=True)
        fields["arrays"] = {name: _pack_array(one) for name, one, other in changed if one is not other}
    if record.streams is not base.streams:
        streams = {
            name: _pack_array(array) for name, array in record.streams.items() if array is not base.streams.get(name)
        }
        if base.streams:
            streams |= dict.fromkeys(base.streams.keys() - record.streams.keys())
        if streams:
            fields["streams"] = streams
    return _Changes(row=row, **fields)


def _pack_array(array: np.ndarray | None) -> _Array | None:
    return None if array is None else _Array(array.dtype.str, array.shape, array.tobytes())


def apply_overlay(raw: Group, blob: bytes) -> Group:
    """The group that an overlay says; arrays it did not change are shared with `raw`.

    Raises:
        WireError: The bytes are no overlay of this group.
    """
    try:
        overlay = _decoder.decode(blob)
        records = [_apply(raw.experiences[changes.row], changes) for changes in overlay.records]
    except (msgspec.MsgspecError, ValueError, IndexError) as error:
        raise WireError(str(raw.id), f"{type(error).__name__}: {error}", "an overlay of this group") from error
    info = raw.info if overlay.info is msgspec.UNSET else overlay.info
    return msgspec.structs.replace(raw, records=tuple(records), info=info)


def _apply(base: Experience, changes: _Changes) -> Experience:
    fields: dict[str, Any] = {name: value for name in PLAIN if (value := getattr(changes, name)) is not msgspec.UNSET}
    fields.update({name: _unpack_array(array) for name, array in changes.arrays.items()})
    if changes.streams:
        streams: dict[str, Any] = dict(base.streams)
        for name, array in changes.streams.items():
            if array is None:
                streams.pop(name, None)
            else:
                streams[name] = _unpack_array(array)
        fields["streams"] = streams
    return msgspec.structs.replace(base, **fields) if fields else base


def _unpack_array(array: _Array | None) -> np.ndarray | None:
    return None if array is None else np.frombuffer(array.data, array.dtype).reshape(array.shape)


# ------------------------------------------------------------------------------------------------ patches

_MERGED = ("reward_parts", "metrics", "info")
_REPLACED = ("reward", "is_valid", "priority")


def check_patch(patch: Mapping[str, Any], where: str) -> None:
    """Raise RecordError for a key that no amendment can change, or a value of the wrong kind."""
    allowed = (*_REPLACED, *_MERGED, "tags", "members")
    for key, value in patch.items():
        if key not in allowed:
            raise RecordError(where, f"an amendment of {key!r}", f"one of {', '.join(allowed)}")
        if key == "reward" and value is not None and not _is_number(value):
            raise RecordError(where, f"reward {value!r}", "a finite number or None")
        if key == "priority" and not _is_number(value):
            raise RecordError(where, f"priority {value!r}", "a finite number")
        if key == "is_valid" and not isinstance(value, bool):
            raise RecordError(where, f"is_valid {value!r}", "true or false")
        if key in (*_MERGED, "members") and not isinstance(value, Mapping):
            raise RecordError(where, f"{key} {value!r}", "a mapping")
        if key == "tags" and not (isinstance(value, list | tuple) and all(isinstance(tag, str) for tag in value)):
            raise RecordError(where, f"tags {value!r}", "a list of names")
    for member, part in patch.get("members", {}).items():
        if not str(member).isdigit() or not isinstance(part, Mapping) or "members" in part:
            raise RecordError(where, f"members.{member}", "a member's number with what changes for it")
        check_patch(part, f"{where}/{member}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))


def patched_members(group: Group, patch: Mapping[str, Any]) -> set[int]:
    """The members a patch speaks of: those it names, else all."""
    named = {int(member) for member in patch.get("members", {})}
    return set(group.members) if patch.keys() - {"members"} else named & group.members.keys()


def apply_patch(group: Group, patch: Mapping[str, Any]) -> Group:
    """A group with a patch's top-level fields in every experience, and those under `members` in the member's.

    `reward`, `is_valid` and `priority` are replaced, `reward_parts`, `metrics` and `info` merged, `tags` go to `info`.
    """
    common = {key: value for key, value in patch.items() if key != "members"}
    members = {int(member): part for member, part in patch.get("members", {}).items()}

    def change(experience: Experience) -> Experience:
        for part in (common, members.get(experience.member, {})):
            fields: dict[str, Any] = {key: part[key] for key in _REPLACED if key in part}
            fields |= {key: {**getattr(experience, key), **part[key]} for key in _MERGED if key in part}
            if "tags" in part:
                info = fields.get("info", experience.info)
                fields["info"] = {**info, "tags": sorted({*info.get("tags", ()), *part["tags"]})}
            if fields:
                experience = experience.replace(**fields)
        return experience

    return group.map(change)
