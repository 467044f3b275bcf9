"""Metric rows as lines of JSON."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from triune.monitor.lines import cut_torn_line
from triune.monitor.sink import OpenSink, Row, RunInfo
from triune.registry import brick


@brick("sink")
@dataclass(frozen=True, kw_only=True)
class Jsonl:
    """Append every row to a file, one JSON object per line with `step`, `role` and `time_s`.

    A line is one `write` call, so a killed process loses no complete row and leaves no torn one that the next start
    would not cut off. NaN is written as null.
    """

    path: str = "metrics.jsonl"
    """File, relative to the run's folder."""

    def __call__(self, info: RunInfo) -> OpenSink:
        return _JsonlFile(info.folder / self.path)


class _JsonlFile:
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        cut_torn_line(self._fd)
        self._encode = msgspec.json.Encoder(decimal_format="number").encode

    def write(self, row: Row) -> None:
        fields: dict[str, object] = {"step": row.step, "role": row.role, "time_s": round(row.time_s, 3), **row.metrics}
        if row.note:
            fields["note"] = row.note
        line = self._encode(fields) + b"\n"
        written = os.write(self._fd, line)
        if written != len(line):
            cut_torn_line(self._fd)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def merged(self, step: int, metrics: Mapping[str, float]) -> None:
        """Single rows are enough for programs."""

    def close(self) -> None:
        os.fsync(self._fd)
        os.close(self._fd)
