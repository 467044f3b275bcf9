"""The monitor of one process of a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triune.errors import TrainingError
from triune.monitor.config import MonitorSettings
from triune.monitor.history import past_steps
from triune.monitor.series import Series
from triune.monitor.sink import OpenSink, Row, RunInfo
from triune.monitor.stages import Clock, Stages, Timed, Wait, Waits
from triune.monitor.steps import StepMerger
from triune.monitor.summary import MAX_METRICS, error_summary, metrics_summary, write_json

MAX_NOTES = 200
"""Notes kept for the summary."""


class RunMonitor:
    """Implements the `Monitor` port: rows to sinks, alarms at step boundaries, waits, summary and curve.

    Any thread may log. Use it as a context manager, or call `start` and `finish`.

    Args:
        settings: Section `monitor` of the run file.
        info: Run name, folder and number of steps.
        clock: Monotonic seconds; a test hands in its own.
    """

    def __init__(self, settings: MonitorSettings, info: RunInfo, *, clock: Clock = time.monotonic) -> None:
        self.settings, self.info = settings, info
        self.notes: list[str] = []
        self._stages, self._waits, self._steps = Stages(clock), Waits(clock), StepMerger(info.roles)
        self._series: dict[str, Series] = {}
        self._first_left_out = ""
        self._sinks: dict[str, OpenSink] = {}
        self._alarm_states: list[tuple[str, Any, dict[str, float], bool]] = [
            (_name(alarm), alarm, {}, False) for alarm in settings.alarms
        ]
        self._lock = threading.RLock()
        self._evaluated: dict[str, float] = {}
        self._stop: TrainingError | None = None
        self._step = 0
        self._idle_steps: dict[str, int] = {}
        self._started_s, self._clock, self._began_s = time.time(), clock, clock()
        self._quit = threading.Event()
        self._beat: threading.Thread | None = None

    # ---- life

    def start(self, *, resumed_step: int | None = None) -> RunMonitor:
        """Open the sinks, write a summary with status `running`, and start the heartbeat.

        Args:
            resumed_step: The run goes on after this step: what `metrics.jsonl` holds up to it counts as this run's
                past, and a row says from where it goes on (later rows of the file before it are a lost line).

        Raises:
            MissingDependency: A sink needs a package that is not installed.
        """
        self._open_sinks()
        if resumed_step is not None:
            self._step = resumed_step
            for step, metrics in past_steps(self.info.folder / "metrics.jsonl", resumed_step):
                self._follow(step, metrics)
            self._note(f"resumed after step {resumed_step}", {"resumed_step": float(resumed_step)})
        self._write_summary("running", "")
        self._beat = threading.Thread(target=self._beat_until_quit, name="triune-monitor", daemon=True)
        self._beat.start()
        return self

    def finish(self, status: str, reason: str, *, error: BaseException | None = None, **more: Any) -> Path:
        """Close the sinks, draw the curve and write the last `summary.json`; on failure too.

        A process that explores beside a trainer writes `explorer.json` instead: the summary is the trainer's.

        Args:
            status: `finished`, `stopped`, `failed` or `interrupted`.
            reason: Why the run ended, one line.
            error: What ended it, if anything.
            more: Further JSON-like entries of the summary, for example `export="…"`.

        Returns:
            Path of `summary.json`.
        """
        self._quit.set()
        if self._beat is not None:
            self._beat.join(timeout=5)
        with self._lock:
            for done in self._steps.rest():
                self._step_done(*done)
            self._close_sinks()
        self._hear_others()
        if self.settings.curve and self._series and not self._is_beside:
            from triune.monitor.curve import draw_curve

            try:
                curve = draw_curve(self._series, self.info.folder / "curve.png", title=self.info.name)
            except OSError as problem:  # a full disk must not hide how the run ended
                curve = None
                self._note(f"curve.png cannot be written: {problem}", bell=True)
            if curve is not None:
                more["curve"] = str(curve)
        return self._write_summary(status, reason, error, more)

    def reopen(self) -> None:
        """Open the sinks anew: a run that was begun again has another folder under the same name."""
        with self._lock:
            self._close_sinks()
            self._open_sinks()

    def _open_sinks(self) -> None:
        self.info.folder.mkdir(parents=True, exist_ok=True)
        for index, sink in enumerate(self.settings.sinks):
            name = _name(sink)
            try:
                self._sinks[name if name not in self._sinks else f"{name} {index}"] = sink(self.info)
            except OSError as error:
                self._sink_failed(name, error)

    def _close_sinks(self) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                sink.close()
            except OSError as problem:
                self._sink_failed(name, problem)
        self._sinks.clear()

    @property
    def _is_beside(self) -> bool:
        """Whether this process explores beside a trainer, whose summary is the run's."""
        return self.info.roles == ("explorer",)

    def _hear_others(self) -> None:
        """Summarise what explorers in other processes wrote, where this one only trains."""
        if self.info.roles != ("trainer",):
            return
        mine = frozenset(self._series)
        for step, metrics in past_steps(self.info.folder / "metrics.jsonl", self._step):
            self._follow(step, {name: value for name, value in metrics.items() if name not in mine})

    def _write_summary(
        self, status: str, reason: str, error: BaseException | None = None, more: Mapping[str, Any] | None = None
    ) -> Path:
        path = self.info.folder / ("explorer.json" if self._is_beside else "summary.json")
        content: dict[str, Any] = {
            "name": self.info.name,
            "status": status,
            "exit_reason": reason,
            "steps": self._step,
            "steps_wanted": self.info.steps,
            "seconds": round(self._clock() - self._began_s, 3),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(self._started_s)),
            "metrics": metrics_summary(self._series),
            "notes": self.notes,
        }
        if error is not None:
            content["error"] = error_summary(error)
        content.update(more or {})
        try:
            write_json(path, content)
        except OSError as problem:
            self._note(f"summary.json cannot be written: {problem}", bell=True)
        return path

    # ---- the port

    def log(self, metrics: Mapping[str, float], *, role: str, step: int) -> None:
        """Write one row to every sink, with the stage times and the idle ratio since the role's last row.

        Raises:
            TrainingError: In the trainer's own call only: an alarm or a failed sink asks to stop.
        """
        row_metrics = self._stages.take(role)
        if self._idle_steps.get(role) != step:
            self._idle_steps[role] = step
            row_metrics["idle_ratio"] = self._waits.take_idle_ratio(role)
        for name, value in metrics.items():
            try:
                row_metrics[name] = float(value)
            except (TypeError, ValueError):
                self._note(f"metric {name!r} of {role} is {type(value).__name__}, not a number: left out", once=True)
        with self._lock:
            self._write(Row(step=step, role=role, time_s=time.time(), metrics=row_metrics))
            if role == "eval":
                self._evaluated = row_metrics
                self._follow(step, row_metrics)
            else:
                for done in self._steps.add(role, step, row_metrics):
                    self._step_done(*done)
        if role == "trainer":
            self.raise_if_stopped()

    def timed(self, stage: str) -> Timed:
        """Count the wall-clock time of a stage; summed into the next row as `time/<stage>_s`.

        `role/stage` is summed into that role's next row only.
        """
        return self._stages.timed(stage)

    def count_time(self, stage: str, seconds: float) -> None:
        """Count seconds that were measured elsewhere, as if by `timed`."""
        self._stages.add(stage, seconds)

    def waiting(self, role: str, for_what: str) -> Wait:
        """Inside, `role` waits; after `heartbeat_s` the console says for what and since when, and again each time."""
        return self._waits.waiting(role, for_what)

    def note(self, text: str) -> None:
        """Tell people one sentence: on the console, in `metrics.jsonl` and in `summary.json`."""
        self._note(text)

    def raise_if_stopped(self) -> None:
        """Raise the TrainingError of an alarm or sink with policy `stop`; call it at a step boundary."""
        if self._stop is not None:
            raise self._stop

    def first_and_last(self, name: str) -> tuple[float, float] | None:
        """First and last value of a metric over steps, for the closing lines of a run."""
        series = self._series.get(name)
        if series is None or series.first is None or series.last is None:
            return None
        return series.first[1], series.last[1]

    # ---- rows

    def _write(self, row: Row) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                sink.write(row)
            except OSError as error:
                self._sink_failed(name, error)

    def _step_done(self, step: int, metrics: dict[str, float]) -> None:
        self._step = max(step, self._step)
        self._follow(step, metrics)
        for name, sink in list(self._sinks.items()):
            try:
                sink.merged(step, metrics)
            except OSError as error:
                self._sink_failed(name, error)
        for index, (name, alarm, state, was_on) in enumerate(self._alarm_states):
            state, message = alarm({**self._evaluated, **metrics}, state)
            self._alarm_states[index] = name, alarm, state, bool(message)
            if message and not was_on:
                self._alarm_rang(name, alarm.policy, message, step)

    def _alarm_rang(self, name: str, policy: str, message: str, step: int) -> None:
        self._note(f"alarm {name} at step {step}: {message}", {f"alarm/{name}": 1.0}, step=step, bell=True)
        if policy == "stop" and self._stop is None:
            self._stop = TrainingError(
                f"step {step}", f"alarm {name}: {message}", "", f"set monitor.alarms' {name} to `policy: warn` to go on"
            )

    def _follow(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            series = self._series.get(name)
            if series is None:
                if len(self._series) >= MAX_METRICS:
                    first = self._first_left_out = self._first_left_out or name
                    self._note(
                        f"more than {MAX_METRICS} metric names: {first!r} and later ones are not summarised", once=True
                    )
                    continue
                series = self._series[name] = Series()
            series.add(step, value)

    def _sink_failed(self, name: str, error: OSError) -> None:
        self._sinks.pop(name, None)
        reason = error.strerror or str(error)
        self._note(f"sink {name} failed ({reason}) and gets no more rows", bell=True)
        if self.settings.on_sink_failure == "stop" and self._stop is None:
            self._stop = TrainingError(
                f"monitor.sinks.{name}",
                reason,
                "a sink that can be written",
                "free disk space or drop the sink, then resume",
            )

    # ---- notes and heartbeat

    def _note(
        self, text: str, metrics: Mapping[str, float] | None = None, *, step: int | None = None, once: bool = False,
        bell: bool = False,
    ) -> None:  # fmt: skip
        if once and text in self.notes:
            return
        if len(self.notes) < MAX_NOTES:
            self.notes.append(text)
        elif once:
            return
        with self._lock:
            at = self._step if step is None else step
            self._write(Row(step=at, role="monitor", time_s=time.time(), metrics=metrics or {}, note=text))
        if bell and "console" not in self._sinks:
            import sys

            print(f"triune: {text}", file=sys.stderr, flush=True)

    def beat(self) -> None:
        """Say which waits are older than `heartbeat_s`; the heartbeat thread calls it."""
        for sentence in self._waits.due(self.settings.heartbeat_s):
            with self._lock:
                self._write(Row(step=self._step, role="monitor", time_s=time.time(), note=sentence))

    def _beat_until_quit(self) -> None:
        tick_s = min(1.0, self.settings.heartbeat_s)
        while not self._quit.wait(tick_s):
            self.beat()
            for sink in list(self._sinks.values()):
                show = getattr(sink, "show_waits", None)
                if show is not None:
                    show(self._waits.open())


def _name(brick: Any) -> str:
    return getattr(brick, "__brick__", ("", type(brick).__name__.lower()))[1]
