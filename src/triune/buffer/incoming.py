"""Reads rows of files that others wrote, and tells which of a few formats each is of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from triune.errors import ConfigError, StoreError, TaskError

Format = Literal["entries", "chat", "sharegpt", "pairs"]
FORMATS: Mapping[str, str] = {
    "entries": "what `triune buffer export` writes",
    "chat": "`messages` with role and content, the last one the assistant's",
    "sharegpt": "`conversations` with from and value",
    "pairs": "`chosen` and `rejected`, with `prompt` or as whole conversations",
}

_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bot"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
_TABLES = (".parquet", ".arrow", ".feather")


class Row(NamedTuple):
    """One row of a file: its number from 1 (its line, where the file has lines), its fields, or why there are none."""

    file: str
    number: int
    data: Mapping[str, Any]
    refusal: str = ""


def read_rows(path: Path) -> Iterator[Row]:
    """Rows of a file (`.jsonl`, `.json`, `.parquet`, `.arrow`) or of all tables of a folder, in order.

    Raises:
        ConfigError: The name says no format.
        StoreError: It is missing, or no file of that format.
    """
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in (".parquet", ".arrow"))
        if not files:
            raise StoreError(str(path), "no .parquet or .arrow file in it", "a dataset's folder", "name a file")
    else:
        files = [path]
    for file in files:
        for number, data in enumerate(_read_file(file), start=1):
            if data is not None:
                yield Row(str(file), number, {}, data) if isinstance(data, str) else Row(str(file), number, data)


def _read_file(file: Path) -> Iterator[Mapping[str, Any] | str | None]:
    """Rows, texts that say why one cannot be read, and None for an empty line."""
    reader = _read_table if file.suffix in _TABLES else _READERS.get(file.suffix)
    if reader is None:
        expected = "a name that ends in .jsonl, .json, .parquet or .arrow, or a dataset's folder"
        raise ConfigError("buffer import", f"found {file.name!r}", expected, "rename it after what it holds")
    try:
        yield from reader(file)
    except OSError as error:
        raise StoreError(str(file), f"cannot be read ({error})", "a file with rows", "name another file") from error


def _read_lines(file: Path) -> Iterator[Mapping[str, Any] | str | None]:
    with file.open("rb") as lines:
        for line in lines:
            try:
                yield msgspec.json.decode(line, type=dict[str, Any]) if line.strip() else None
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                yield f"no JSON object ({error})"


def _read_json(file: Path) -> Iterator[Mapping[str, Any] | str | None]:
    """A list of objects, one object, or one a line after all."""
    try:
        content = msgspec.json.decode(file.read_bytes())
    except (msgspec.MsgspecError, UnicodeDecodeError):
        yield from _read_lines(file)
        return
    for each in content if isinstance(content, list) else [content]:
        yield each if isinstance(each, dict) else f"no JSON object ({each!r:.40})"


def _read_table(file: Path) -> Iterator[Mapping[str, Any] | str]:
    import pyarrow as arrow
    from pyarrow import ipc, parquet

    try:
        if file.suffix == ".parquet":
            batches: Any = parquet.ParquetFile(file).iter_batches(batch_size=256)
        else:
            source = arrow.memory_map(str(file))
            try:
                opened = ipc.open_file(source)
                batches = (opened.get_batch(number) for number in range(opened.num_record_batches))
            except arrow.ArrowInvalid:
                source.seek(0)
                batches = ipc.open_stream(source)
        for batch in batches:
            for start in range(0, batch.num_rows, 256):
                yield from batch.slice(start, 256).to_pylist()
    except arrow.ArrowException as error:
        raise StoreError(str(file), f"no {file.suffix[1:]} file ({error})", "a table", "name another file") from error


_READERS: Mapping[str, Any] = {".jsonl": _read_lines, ".ndjson": _read_lines, ".json": _read_json}


def detect_format(data: Mapping[str, Any]) -> Format | None:
    """The format of a row, by its fields; None when it has those of none."""
    if "group" in data and ("state" in data or "tokens" in data):
        return "entries"
    if "chosen" in data and "rejected" in data:
        return "pairs"
    if data.get("messages") is not None:
        return "chat"
    return "sharegpt" if data.get("conversations") is not None else None


def _entry_of(row: Row) -> Any:
    return row.data.get("entry") if "tokens" in row.data else (row.file, row.number)


def entries_of_table(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Rows of one entry together: a JSONL line is one alone, table rows of an entry follow each other."""
    for _, part in groupby(rows, key=_entry_of):
        yield list(part)


def normalise(data: Mapping[str, Any], format: Format) -> dict[str, Any]:
    """A row of text as the row reader expects it: chat `messages`, or `prompt`, `chosen` and `rejected`.

    Raises:
        TaskError: A field is missing or of the wrong kind.
    """
    row = {name: _without_none(value) for name, value in data.items() if value is not None}
    if format == "sharegpt":
        said = row.pop("conversations", None)
        turns = [_turn(turn) for turn in _list_of(said, "conversations")]
        system = row.get("system")
        row["messages"] = [*([{"role": "system", "content": system}] if isinstance(system, str) else []), *turns]
    if format in ("chat", "sharegpt"):
        for message in _list_of(row.get("messages"), "messages"):
            _check_message(message)
    if format == "pairs":
        for name in ("prompt", "chosen", "rejected"):
            value = row.get(name)
            for message in value if isinstance(value, list) else ():
                _check_message(message)
    return row


def _without_none(value: Any) -> Any:
    """Tables fill up missing fields of nested values with None."""
    if isinstance(value, Mapping):
        return {name: _without_none(item) for name, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _list_of(value: Any, name: str) -> Sequence[Any]:
    if not isinstance(value, list) or not value:
        raise TaskError(name, f"{value!r:.60}", "a list of messages", "map or filter such rows")
    return value


def _turn(turn: Any) -> dict[str, Any]:
    if not isinstance(turn, Mapping) or "from" not in turn or "value" not in turn:
        raise TaskError("conversations", f"{turn!r:.60}", "`from` and `value` in each")
    role = _ROLES.get(str(turn["from"]).lower())
    if role is None:
        raise TaskError("conversations.from", f"{turn['from']!r}", f"one of {', '.join(_ROLES)}", "rename it")
    return {"role": role, "content": turn["value"]}


def _check_message(message: Any) -> None:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TaskError("messages", f"{message!r:.60}", "`role` and `content` in each")
    if not isinstance(message.get("content"), str | list) and "tool_calls" not in message:
        raise TaskError("messages.content", f"{message.get('content')!r:.60}", "text", "filter such rows")


def refuse_unknown(path: Path, data: Mapping[str, Any]) -> ConfigError:
    """The error for a file whose first row is of no known format."""
    known = "; ".join(f"{name}: {about}" for name, about in FORMATS.items())
    return ConfigError(
        str(path), f"rows with {', '.join(map(str, data)) or 'nothing'}", known, "rename its fields, or give --format"
    )
