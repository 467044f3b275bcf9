"""Rows of a JSON Lines file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from triune.errors import TaskError
from triune.registry import brick
from triune.tasks.fields import map_fields
from triune.tasks.files import find_files, hash_files
from triune.tasks.taskset import Taskset, check_unique_ids

_decoder = msgspec.json.Decoder(dict[str, Any])


@brick("taskset")
@dataclass(frozen=True, kw_only=True)
class Jsonl(Taskset):
    """One JSON object a line; empty lines are skipped.

    Every line is read and checked when the run starts, so a malformed one is an error with its number then, not in
    step 300. Afterwards lines stay in memory as bytes and are decoded again when their turn comes.

    Attributes:
        path: A file, or a glob such as `data/*.jsonl`.
    """

    path: str

    def open(self, seed: int, where: str) -> JsonlRows:
        """Read and check all lines; raises TaskError."""
        return JsonlRows(find_files(self.path, f"{where}.path"), self.fields)

    def _first_fields(self) -> frozenset[str] | None:
        try:
            with find_files(self.path, "")[0].open("rb") as file:
                line = next((line for line in file if line.strip()), b"")
            return frozenset(_decoder.decode(line))
        except (OSError, TaskError, msgspec.MsgspecError, UnicodeDecodeError):
            return None


class JsonlRows:
    """Checked lines."""

    has_keys = False
    block = 64

    def __init__(self, paths: list[Path], fields: Mapping[str, str]) -> None:
        self._lines: list[bytes] = []
        self._places: list[tuple[Path, int, int]] = []  # file, number of its first row, then one entry a gap
        self.content_hash = hash_files(paths)
        ids = []
        for path in paths:
            for line_number, line in enumerate(path.read_bytes().split(b"\n"), 1):
                if line.strip():
                    place = f"{path}:{line_number}"
                    row = map_fields(_decode(line, place), fields, lambda place=place: place)
                    self._note_place(path, line_number)
                    self._lines.append(line)
                    ids.append(row.get("id"))
        self.size: int | None = len(self._lines)
        check_unique_ids(enumerate(ids), self)

    def _note_place(self, path: Path, line_number: int) -> None:
        row = len(self._lines)
        if not self._places or self._places[-1][0] != path or line_number - row != self._places[-1][2]:
            self._places.append((path, row, line_number - row))

    def read(self, numbers: Sequence[int]) -> list[Mapping[str, Any]]:
        """Rows by number, as dictionaries."""
        return [_decoder.decode(self._lines[number]) for number in numbers]

    def place(self, number: int) -> str:
        """`file:line`, counted from 1 as editors do."""
        path, _, shift = next(entry for entry in reversed(self._places) if entry[1] <= number)
        return f"{path}:{number + shift}"


def _decode(line: bytes, place: str) -> dict[str, Any]:
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        shown = line[:60].decode("utf-8", "replace").strip()
        raise TaskError(place, f"{shown!r} ({error})", "one JSON object a line", "correct or remove the line") from None
