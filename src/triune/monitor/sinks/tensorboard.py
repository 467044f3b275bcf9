"""Metric rows as TensorBoard event files."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triune.errors import MissingDependency
from triune.monitor.sink import OpenSink, Row, RunInfo
from triune.registry import brick


@brick("sink")
@dataclass(frozen=True, kw_only=True)
class Tensorboard:
    """Write every metric as the scalar `role/name`; look at it with `tensorboard --logdir runs`.

    Needs `pip install 'triune[tensorboard]'`; loads neither torch nor TensorFlow.
    """

    path: str = "tensorboard"
    """Folder of the event files, relative to the run's folder."""

    def __call__(self, info: RunInfo) -> OpenSink:
        try:
            events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
            summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise MissingDependency(
                "monitor.sinks", f"tensorboard is not installed ({error})", "", "pip install 'triune[tensorboard]'"
            ) from error
        return _Events(EventFileWriter(str(info.folder / self.path)), events.Event, summaries.Summary)


class _Events:
    def __init__(self, writer: Any, event: Any, summary: Any) -> None:
        self._writer, self._event, self._summary = writer, event, summary

    def write(self, row: Row) -> None:
        values = [
            self._summary.Value(tag=f"{row.role}/{name}", simple_value=value)
            for name, value in row.metrics.items()
            if math.isfinite(value)
        ]
        if values:
            self._writer.add_event(
                self._event(step=row.step, wall_time=row.time_s, summary=self._summary(value=values))
            )

    def merged(self, step: int, metrics: Mapping[str, float]) -> None:
        """TensorBoard shows the roles' rows."""

    def close(self) -> None:
        self._writer.flush()
        self._writer.close()
