"""A metric sink that notes wall-clock and processor time at the end of each step, for benches.

`metrics.jsonl` has the wall-clock in milliseconds. Processor seconds tell what a step cost where other processes
disturb the clock, and are not in a row because they are nobody's business but a bench's.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from triune.monitor import OpenSink, Row, RunInfo
from triune.registry import brick

FILE = "steps_clock.json"


@brick("sink")
@dataclass(frozen=True, kw_only=True)
class StepsClock:
    """Writes `steps_clock.json` when the run ends: `[wall seconds, processor seconds]` at the end of each step."""

    def __call__(self, info: RunInfo) -> OpenSink:
        return _Marks(info.folder / FILE)


class _Marks:
    def __init__(self, path: Path) -> None:
        self._path, self._marks = path, list[tuple[float, float]]()

    def write(self, row: Row) -> None:
        """A row of the trainer ends a step."""
        if row.role == "trainer" and row.step > 0:
            self._marks.append(now())

    def merged(self, step: int, metrics: Mapping[str, float]) -> None:
        """Not needed."""

    def close(self) -> None:
        self._path.write_text(json.dumps(self._marks))


def now() -> tuple[float, float]:
    """Wall-clock and processor seconds of this process."""
    return time.perf_counter(), time.process_time()


def peak_memory_gb() -> float:
    """Largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
