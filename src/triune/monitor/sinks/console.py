"""The run on the screen."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from triune.monitor.sink import OpenSink, Row, RunInfo
from triune.registry import brick

_SHOWN: tuple[tuple[str, str, str], ...] = (
    ("reward", "reward", "{:.3f}"),
    ("accuracy", "accuracy", "{:.3f}"),
    ("loss", "loss", "{:+.4f}"),
    ("kl", "kl", "{:.4f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("grad_norm", "grad", "{:.3f}"),
    ("logprob_gap", "gap", "{:.4f}"),
    ("response_length", "length", "{:.1f}"),
    ("staleness", "stale", "{:.2f}"),
    ("flat_group_ratio", "flat", "{:.2f}"),
    ("tokens_per_s", "tok/s", "{:,.0f}"),
)


@brick("sink")
@dataclass(frozen=True, kw_only=True)
class Console:
    """Print one line per step; on a terminal also a live panel with progress, metrics and who waits for what."""

    every: int = 1
    """Print every n-th step; evaluations, notes and the last step are always printed."""

    live: bool | None = None
    """Live panel below the lines; null = when the output is a terminal."""

    def __call__(self, info: RunInfo) -> OpenSink:
        stream = sys.stdout
        is_live = stream.isatty() if self.live is None else self.live
        return (_LiveConsole if is_live else _PlainConsole)(self.every, info, stream)


def step_line(step: int, steps: int | None, metrics: Mapping[str, float], seconds: float | None) -> str:
    """`step 12/60  reward 0.512  loss +0.0031 …  1.2 s`."""
    width = len(str(steps)) if steps else 1
    parts = [f"step {step:>{width}}" + (f"/{steps}" if steps else "")]
    parts += [f"{label} {form.format(metrics[name])}" for name, label, form in _SHOWN if name in metrics]
    if seconds is not None:
        parts.append(f"{seconds:.2f} s")
    return "  ".join(parts)


def evaluation_line(row: Row) -> str:
    """`eval at step 10  addition/mean@1 0.71 [0.66, 0.76]  addition/pass@4 0.93`."""
    shown = []
    for name, value in row.metrics.items():
        if not name.startswith("eval/") or "@" not in name or name.endswith(("/low", "/high")):
            continue
        low, high = row.metrics.get(f"{name}/low"), row.metrics.get(f"{name}/high")
        interval = f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else ""
        shown.append(f"{name.removeprefix('eval/')} {value:.3f}{interval}")
    return f"eval at step {row.step}  " + "  ".join(shown)


class _PlainConsole:
    """Lines only: for files, pipes, CI and notebooks."""

    def __init__(self, every: int, info: RunInfo, stream: TextIO) -> None:
        self.every, self.info, self.stream = every, info, stream
        self._last_s: float | None = None

    def print(self, line: str) -> None:
        print(line, file=self.stream, flush=True)

    def write(self, row: Row) -> None:
        if row.note:
            self.print(f"  {row.note}")
        if any(name.startswith("eval/") for name in row.metrics):
            self.print(evaluation_line(row))

    def merged(self, step: int, metrics: Mapping[str, float]) -> None:
        if not any(name in metrics for name, _, _ in _SHOWN):
            return  # facts before the first step
        now = time.monotonic()
        seconds = None if self._last_s is None else now - self._last_s
        self._last_s = now
        if step % self.every == 0 or step == self.info.steps:
            self.print(step_line(step, self.info.steps, metrics, seconds))

    def show_waits(self, waits: list[str]) -> None:
        """Plain output says waits by heartbeat notes only."""

    def close(self) -> None:
        self.stream.flush()


class _LiveConsole(_PlainConsole):
    """The same lines above a panel that is redrawn four times a second."""

    def __init__(self, every: int, info: RunInfo, stream: TextIO) -> None:
        from rich.console import Console as RichConsole
        from rich.live import Live

        super().__init__(every, info, stream)
        self._console = RichConsole(file=stream, highlight=False, force_terminal=True)
        self._step = 0
        self._waits: list[str] = []
        self._start_s = time.monotonic()
        self._live = Live(get_renderable=self._panel, console=self._console, refresh_per_second=4, transient=True)
        self._live.start()

    def print(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)

    def merged(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step
        super().merged(step, metrics)

    def show_waits(self, waits: list[str]) -> None:
        self._waits = waits

    def _panel(self) -> Any:
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        seconds = time.monotonic() - self._start_s
        rows: list[Any] = []
        if self.info.steps:
            rows.append(ProgressBar(total=self.info.steps, completed=self._step))
            left = f", about {seconds / self._step * (self.info.steps - self._step):.0f} s left" if self._step else ""
            rows.append(Text(f"step {self._step}/{self.info.steps} after {seconds:.0f} s{left}"))
        else:
            rows.append(Text(f"step {self._step} after {seconds:.0f} s"))
        rows += [Text(wait, style="yellow") for wait in self._waits]
        return Panel(Group(*rows), title=f"{self.info.name}", subtitle=str(self.info.folder), expand=True)

    def close(self) -> None:
        self._live.stop()
        super().close()
