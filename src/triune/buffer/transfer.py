"""Entries as JSON lines: for people, for other tools, and for another buffer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from triune.errors import RecordError, StoreError
from triune.records import Experience, ExperienceId, Group, GroupId, Pair, Record, Task, Text

FORMAT = 1
_DTYPES = {
    "tokens": np.int32,
    "action_mask": np.bool_,
    "logprobs": np.float32,
    "versions": np.int32,
    "raw_logprobs": np.float32,
}


def to_plain(value: Any) -> Any:
    """A group or a record as JSON-like values: arrays become lists, NaN becomes None, ids their text."""
    if isinstance(value, np.ndarray):
        listed = value.tolist()
        return _without_nan(listed) if value.dtype.kind == "f" else listed
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Record):
        kind = type(value).__name__.lower()
        return {"kind": kind, **{name: to_plain(getattr(value, name)) for name in value.__struct_fields__}}
    if isinstance(value, msgspec.Struct):
        if hasattr(type(value), "parse"):
            return str(value)
        return {name: to_plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def _without_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if value != value else value


def from_plain(plain: Mapping[str, Any]) -> Group:
    """Invert `to_plain` of a group.

    Raises:
        RecordError: Fields are missing or of the wrong kind.
    """
    try:
        return Group(
            id=GroupId.parse(plain["id"]),
            task=msgspec.convert(plain["task"], Task),
            records=tuple(_record(record) for record in plain["records"]),
            info=plain.get("info", {}),
            unknown=plain.get("unknown", {}),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, msgspec.ValidationError) as error:
        raise RecordError("JSON line", f"{type(error).__name__}: {error}", "a group as `to_plain` writes it") from error


def _record(plain: Mapping[str, Any]) -> Record:
    kind = plain.get("kind", "experience")
    if kind == "experience":
        return _experience(plain)
    rest = {name: value for name, value in plain.items() if name not in ("kind", "chosen", "rejected", "tokens")}
    if kind == "pair":
        return Pair(chosen=_experience(plain["chosen"]), rejected=_experience(plain["rejected"]), **rest)
    if kind == "text":
        return Text(tokens=np.asarray(plain["tokens"], np.int32), **rest)
    raise RecordError("JSON line", f"a record of kind {kind!r}", "experience, pair or text")


def _experience(plain: Mapping[str, Any]) -> Experience:
    arrays: dict[str, Any] = {
        name: np.array(plain[name], dtype) for name, dtype in _DTYPES.items() if plain.get(name) is not None
    }
    if isinstance(plain.get("temperature"), list):
        arrays["temperature"] = np.array(plain["temperature"], np.float32)
    arrays["streams"] = {name: _stream(values) for name, values in plain.get("streams", {}).items()}
    rest = {name: value for name, value in plain.items() if name not in arrays}
    fields = msgspec.structs.asdict(msgspec.convert(rest, _Fields))
    return Experience(id=ExperienceId.parse(plain["id"]), **{**fields, **arrays})


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return msgspec.field(default_factory=field.default_factory)
    return field.default


_Fields: Any = msgspec.defstruct(
    "_Fields",
    [
        (field.name, float if field.name == "temperature" else field.type, _default(field))
        for field in msgspec.structs.fields(Experience)
        if field.name not in {*_DTYPES, "id", "streams"}
    ],
)
"""Everything of an experience that is no array."""


def _stream(values: Any) -> np.ndarray:
    array = np.array(values)
    return array.astype(np.int32) if array.dtype.kind in "iu" else np.array(values, np.float32)


class LineWriter:
    """A file of one JSON object per line that is there as a whole or not at all; a context manager.

    Attributes:
        number: Lines written so far.

    Raises:
        StoreError: The folder is missing or the disk is full; no half file is left.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.number = path, 0
        self._partial = path.with_name(path.name + ".partial")
        self._file: BinaryIO | None = None

    def __enter__(self) -> LineWriter:
        with self._in_words():
            self._file = self._partial.open("wb")
        return self

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line."""
        assert self._file is not None, "it is open inside `with`"
        with self._in_words():
            self._file.write(msgspec.json.encode(line, enc_hook=str) + b"\n")
        self.number += 1

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        assert self._file is not None, "it was opened by `with`"
        try:
            with self._in_words():
                if kind is None:
                    self._file.flush()
                    os.fsync(self._file.fileno())
                    self._file.close()
                    self._partial.replace(self.path)
        finally:
            with suppress(OSError):  # a full disk cannot take what is left in memory either
                self._file.close()
            self._partial.unlink(missing_ok=True)

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(
                str(self.path), f"cannot be written ({error})", "a writable folder with space", "name another file"
            ) from error


def import_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read the lines of a `LineWriter`.

    Raises:
        StoreError: The file is missing.
        RecordError: A line is no entry; names its number.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise StoreError(
            str(path), f"cannot be read ({error})", "a file of `triune buffer export`", "name another file"
        ) from error
    with file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield msgspec.json.decode(line, type=dict[str, Any])
            except msgspec.DecodeError as error:
                raise RecordError(f"{path}:{number}", f"{error}", "one JSON object per line") from error
