"""What a metric sink is: a brick that opens once per run and takes rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a sink may know about the run it belongs to.

    Attributes:
        name: Name of the run.
        folder: The run's folder; a sink writes nowhere else.
        steps: Steps the run is to take; None = not known (exploring, serving).
        roles: Roles of this process, for example `("explorer", "trainer")`.
    """

    name: str
    folder: Path
    steps: int | None = None
    roles: tuple[str, ...] = ("explorer", "trainer")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the metric stream.

    Attributes:
        step: Steps completed when it was logged: the axis of every chart.
        role: `trainer`, `explorer`, `eval`, …; `monitor` for notes.
        time_s: Unix time.
        metrics: Finite or NaN numbers by name.
        note: A sentence for people (alarm, wait, failed sink); empty on ordinary rows.
    """

    step: int
    role: str
    time_s: float
    metrics: Mapping[str, float] = {}
    note: str = ""


class OpenSink(Protocol):
    """An opened sink. It may raise OSError; the monitor names it and disables it or ends the run, by policy.

    A sink brick is a frozen dataclass whose `__call__(info: RunInfo)` returns one of these.
    """

    def write(self, row: Row) -> None:
        """Take one row, quickly: this runs between two steps."""
        ...

    def merged(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is complete: the values of all roles as one row (for people; programs read the single rows)."""
        ...

    def close(self) -> None:
        """Flush to disk and free everything."""
        ...
