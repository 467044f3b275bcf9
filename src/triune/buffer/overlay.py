"""Revisions as overlays: only what an operator or a person changed, on top of the raw group's immutable blob.

    0   magic `TRIO`      4   crc32 of what follows, little-endian      8   msgpack

Overlays of before there was a checksum begin with the msgpack itself, whose first byte is never a `T`; they are read.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from itertools import compress
from operator import attrgetter, is_, is_not
from typing import Any, NamedTuple

import msgspec
import numpy as np

from triune.errors import RecordError, WireError
from triune.records import Experience, Group, Source, Stop, Turn

ARRAYS = ("tokens", "action_mask", "logprobs", "versions", "raw_logprobs")
PLAIN = (
    *("reward", "reward_parts", "is_valid", "operators", "priority", "metrics", "info", "turns", "stop", "source"),
    "parents",
)
KEPT = ("messages", "tools", "media", "unknown", "temperature")
"""Fields an overlay does not carry: when one of them differs, the revision is stored whole."""

UNSUMMED = frozenset({"streams", "reward_parts", "operators", "metrics", "info", "parents"})
"""Fields that change nothing of what the store indexes."""

_NAMES = (*PLAIN, *ARRAYS, "streams", *KEPT)
_ALL, _ID = attrgetter(*_NAMES), attrgetter("id")
_MAGIC = b"TRIO"
_DTYPES = {np.dtype(code): np.dtype(code).str for code in ("f4", "i4", "?")}

U = msgspec.UNSET


class _Array(msgspec.Struct, array_like=True, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _Overlay(msgspec.Struct, frozen=True, kw_only=True):
    """Columns: for every field that changed in some record, its value in all of them; UNSET = in none.

    `rows` are the raw records they are made from, in their new order; UNSET = all, in order.
    """

    num: int
    rows: list[int] | msgspec.UnsetType = U
    group_info: dict[str, Any] | msgspec.UnsetType = U
    reward: list[float | None] | msgspec.UnsetType = U
    reward_parts: list[dict[str, float]] | msgspec.UnsetType = U
    is_valid: list[bool] | msgspec.UnsetType = U
    operators: list[tuple[str, ...]] | msgspec.UnsetType = U
    priority: list[float] | msgspec.UnsetType = U
    metrics: list[dict[str, float]] | msgspec.UnsetType = U
    info: list[dict[str, Any]] | msgspec.UnsetType = U
    turns: list[tuple[Turn, ...]] | msgspec.UnsetType = U
    stop: list[Stop] | msgspec.UnsetType = U
    source: list[Source] | msgspec.UnsetType = U
    parents: list[tuple[str, ...]] | msgspec.UnsetType = U
    arrays: dict[str, list[_Array | None]] = {}
    streams: list[dict[str, _Array | None]] | msgspec.UnsetType = U


def _plain_number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain_number)
_decoder = msgspec.msgpack.Decoder(_Overlay)


class Difference(NamedTuple):
    """How a shaped group differs from the raw one: which raw records it is made from, and which fields changed."""

    rows: Sequence[int]
    names: frozenset[str]


def compare(raw: Group, shaped: Group) -> Difference | None:
    """The difference that an overlay can carry; None when it cannot."""
    if (
        shaped.id != raw.id
        or shaped.unknown != raw.unknown
        or (shaped.task is not raw.task and shaped.task != raw.task)
    ):
        return None
    bases, records = _experiences(raw), _experiences(shaped)
    rows = _rows_of(bases, records)
    if rows is None:
        return None
    names: set[str] = set()
    for row, record in zip(rows, records, strict=True):
        now, before = _ALL(record), _ALL(bases[row])
        names.update(compress(_NAMES, map(is_not, now, before)))
    for name in names.intersection(KEPT):
        if any(_differ(getattr(one, name), getattr(bases[row], name)) for row, one in zip(rows, records, strict=True)):
            return None
    return Difference(rows, frozenset(names.difference(KEPT)))


def _differ(one: Any, other: Any) -> bool:
    return one is not other and (isinstance(one, np.ndarray) or isinstance(other, np.ndarray) or one != other)


def _experiences(group: Group) -> Sequence[Experience]:
    """The records, when all are experiences; else none."""
    records: Any = group.records
    return records if all(isinstance(record, Experience) for record in records) else ()


def _rows_of(bases: Sequence[Experience], records: Sequence[Experience]) -> Sequence[int] | None:
    """For each record the raw one it is made from, by id; None when one has none."""
    if len(bases) == len(records) and all(map(is_, map(_ID, bases), map(_ID, records))):
        return range(len(records)) if records else None
    row_of = {base.id: row for row, base in enumerate(bases)}
    rows = [row_of.get(record.id, -1) for record in records]
    return None if -1 in rows or not rows else rows


def encode_overlay(raw: Group, shaped: Group, difference: Difference) -> bytes:
    """The fields that differ, as columns.

    Raises:
        RecordError: A field holds something that is no JSON-like value.
    """
    records, bases = _experiences(shaped), _experiences(raw)
    columns: dict[str, Any] = {"num": len(records)}
    if not isinstance(difference.rows, range) or len(records) != len(bases):
        columns["rows"] = list(difference.rows)
    if shaped.info is not raw.info and shaped.info != raw.info:
        columns["group_info"] = shaped.info
    for name in sorted(difference.names):
        if name == "streams":
            columns["streams"] = [
                _changed_streams(bases[row].streams, record.streams)
                for row, record in zip(difference.rows, records, strict=True)
            ]
        elif name in ARRAYS:
            columns.setdefault("arrays", {})[name] = [_pack_array(getattr(record, name)) for record in records]
        else:
            columns[name] = list(map(attrgetter(name), records))
    try:
        body = _encoder.encode(columns)
        return b"".join((_MAGIC, zlib.crc32(body).to_bytes(4, "little"), body))
    except (TypeError, ValueError, OverflowError) as error:
        do = "operators keep plain values in `info` and `metrics`"
        raise RecordError(
            str(raw.id), f"not a JSON-like value: {error}", "text, numbers, lists and mappings", do
        ) from error


def _changed_streams(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Streams that are new or other than before, and None for those that are gone."""
    if not before:
        return {name: _pack_array(array) for name, array in now.items()}
    changed = {name: _pack_array(array) for name, array in now.items() if array is not before.get(name)}
    return changed | dict.fromkeys(before.keys() - now.keys())


def _pack_array(array: np.ndarray | None) -> tuple[str, tuple[int, ...], bytes] | None:
    """The items of an `_Array`."""
    return None if array is None else (_DTYPES.get(array.dtype) or array.dtype.str, array.shape, array.tobytes())


def apply_overlay(raw: Group, blob: bytes | memoryview) -> Group:
    """The group that an overlay says; arrays it did not change are shared with `raw`.

    Raises:
        WireError: The bytes are no overlay of this group, or have changed.
    """
    if blob[:4] == _MAGIC:
        if zlib.crc32(memoryview(blob)[8:]) != int.from_bytes(blob[4:8], "little"):
            found, do = "the checksum of a revision differs", "the blob is truncated or corrupt"
            raise WireError(str(raw.id), found, "the bytes that were written", do)
        blob = memoryview(blob)[8:]
    try:
        overlay = _decoder.decode(blob)
        records = _apply(_experiences(raw), overlay)
    except (msgspec.MsgspecError, ValueError, IndexError) as error:
        raise WireError(str(raw.id), f"{type(error).__name__}: {error}", "an overlay of this group") from error
    info = raw.info if overlay.group_info is U else overlay.group_info
    return msgspec.structs.replace(raw, records=tuple(records), info=info)


def _apply(bases: Sequence[Experience], overlay: _Overlay) -> list[Experience]:
    columns: dict[str, Sequence[Any]] = {name: column for name in PLAIN if (column := getattr(overlay, name)) is not U}
    columns |= {name: [_unpack_array(array) for array in column] for name, column in overlay.arrays.items()}
    rows = range(overlay.num) if isinstance(overlay.rows, msgspec.UnsetType) else overlay.rows
    records = []
    for number, row in enumerate(rows):
        fields: dict[str, Any] = {name: column[number] for name, column in columns.items()}
        if not isinstance(overlay.streams, msgspec.UnsetType):
            changed = overlay.streams[number]
            streams = {**bases[row].streams, **{name: _unpack_array(array) for name, array in changed.items()}}
            fields["streams"] = {name: array for name, array in streams.items() if array is not None}
        records.append(msgspec.structs.replace(bases[row], **fields))
    return records


def _unpack_array(array: _Array | None) -> np.ndarray | None:
    return None if array is None else np.frombuffer(array.data, array.dtype).reshape(array.shape)
