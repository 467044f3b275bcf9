"""Runs one after another, each from the weights of the one before.

runs/<name>/
  run.resolved.json       all stages, as one run file
  summary.json            status of the whole and of every stage, first and last values
  01-<stage>/             an ordinary run's folder
  02-<stage>/             … with `parent.json`: which weights it began with
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from triune.config import RunConfig, StagedConfig, check_same_stages, save_staged, stage_name
from triune.errors import CheckpointError, ConfigError, RunFailed, TriuneError
from triune.failpoints import failpoint
from triune.launcher.folder import RunFolder, Start
from triune.launcher.local import launch
from triune.launcher.request import Request
from triune.launcher.standing import Standing, read_summary, standing
from triune.monitor.summary import error_summary, write_json

PARENT = "parent.json"
"""File in a stage's folder that names the weights it began with."""


def run_stages(
    config: StagedConfig,
    *,
    start: Start,
    allow_changes: bool = False,
    workflow: Any = None,
    reward: Any = None,
    say: Callable[[str], None] = lambda sentence: None,
) -> dict[str, Any]:
    """Run every stage that is not finished, in order.

    Args:
        config: The stages.
        start: New, resumed (finished stages are skipped, an unfinished one goes on), or begun again.
        allow_changes: Resume with settings that have changed.
        workflow: From `triune.run(workflow=…)`, for all stages.
        reward: Likewise.
        say: Told which stage begins or is skipped.

    Returns:
        What `summary.json` of the whole says.

    Raises:
        RunFailed: A stage failed; names it. The later ones were not begun.
        CheckpointError: What is there was made with other settings or from other weights.
        KeyboardInterrupt: A signal ended it; it can be resumed.
    """
    if start is Start.RESUME and (config.run_dir / "run.resolved.json").exists():
        check_same_stages(config)
    folder = RunFolder.open(config.runs_dir, config.name, start, roles=("stages",))
    try:
        plan = plan_stages(config.stages, allow_changes=allow_changes)
        save_staged(config)
        record = Record(config, plan)
        record.write("running", "")
        try:
            for number, state in enumerate(plan):
                request = Request(
                    config=config.stages[number],
                    roles=("explorer", "trainer"),
                    start=state.start,
                    allow_changes=allow_changes,
                    workflow=workflow,
                    reward=reward,
                )
                _run_stage(request, number, state, record, say)
        except KeyboardInterrupt as signal:
            record.interrupt(str(signal) or "Ctrl-C")
            raise
        return record.write("finished", f"{len(plan)} stages done")
    finally:
        folder.release()


def _run_stage(request: Request, number: int, state: Standing, record: Record, say: Callable[[str], None]) -> None:
    stage, stages = request.config, record.config.stages
    label = f"stage {number + 1} of {len(stages)}, {stage_name(stage)}"
    if state is Standing.FINISHED:
        say(f"{label}: is finished, skipped")
        return
    failpoint("launcher.stages.between")
    say(f"{label}: {'goes on' if state is Standing.BEGUN else 'begins'} in {stage.run_dir}")
    record.begin(number)
    try:
        if number and state is Standing.NEW:
            _note_parent(stages[number - 1], stage)
        launch(request)
    except Exception as error:
        record.fail(number, label, error)
        if not isinstance(error, TriuneError):
            raise
        if error.exit_code == ConfigError.exit_code:
            raise ConfigError(f"{label}: {error.where}", error.found, error.expected, error.do) from error.__cause__
        raise RunFailed(label, str(error), "", "correct the cause, then go on with --resume") from error
    record.finish(number)


# ------------------------------------------------------------------------------------------------- what is there


def plan_stages(stages: Sequence[RunConfig], *, allow_changes: bool = False) -> list[Standing]:
    """How far each stage is.

    Raises:
        CheckpointError: A stage was begun with other settings, or from weights that its parent no longer exports.
    """
    plan = [standing(stage, allow_changes=allow_changes) for stage in stages]
    for number, stage in enumerate(stages[1:], start=1):
        if plan[number] is not Standing.NEW:
            _check_parent(stages[number - 1], plan[number - 1], stage)
    return plan


def _check_parent(parent: RunConfig, state: Standing, stage: RunConfig) -> None:
    do = f"move {stage.run_dir} aside and resume, or begin all stages again with --restart"
    if state is not Standing.FINISHED:
        raise CheckpointError(
            str(stage.run_dir),
            f"it began with the weights of {parent.name}, which is not finished or is to be trained further",
            "a parent that stays as it was",
            do,
        )
    began, now = _parent_of(stage), weights_digest(parent)
    if began != now:
        raise CheckpointError(
            str(stage.run_dir),
            f"it began with other weights than {parent.name} exports now ({began or 'unknown'}, now {now})",
            "the weights it began with",
            do,
        )


def _note_parent(parent: RunConfig, stage: RunConfig) -> None:
    content = {"stage": parent.name, "export": stage.model.path, "weights": weights_digest(parent)}
    write_json(stage.run_dir / PARENT, content)


def _parent_of(stage: RunConfig) -> str:
    try:
        return json.loads((stage.run_dir / PARENT).read_text(encoding="utf-8"))["weights"]
    except (OSError, ValueError, KeyError):
        return ""


def weights_digest(stage: RunConfig) -> str:
    """16 hex digits over the weight files that a stage exported.

    Raises:
        CheckpointError: It has no export any more.
    """
    folder = stage.run_dir / "export"
    digest = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            str(folder), "no exported weights", "the weights of a finished stage", f"`triune export {stage.run_dir}`"
        )
    for path in files:
        with path.open("rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


# ------------------------------------------------------------------------------------------------------ the whole


class Record:
    """`summary.json` of the whole, rewritten whenever a stage begins or ends."""

    def __init__(self, config: StagedConfig, plan: Sequence[Standing]) -> None:
        self.config = config
        self._began_s, self._started = time.monotonic(), time.strftime("%Y-%m-%dT%H:%M:%S%z")
        self._entries = [
            self._read(stage, "finished" if state is Standing.FINISHED else "waiting")
            for stage, state in zip(config.stages, plan, strict=True)
        ]

    def begin(self, number: int) -> None:
        """A stage begins."""
        self._entries[number] = self._read(self.config.stages[number], "running")
        self.write("running", "")

    def finish(self, number: int) -> None:
        """A stage is done; its own summary says what it reached."""
        self._entries[number] = self._read(self.config.stages[number], "finished")
        self.write("running", "")

    def fail(self, number: int, label: str, error: Exception) -> None:
        """A stage failed, and with it the whole."""
        stage, text = self.config.stages[number], str(error) or type(error).__name__
        self._entries[number] = {**self._read(stage, "failed"), "exit_reason": text}
        self.write("failed", f"{label}: {text}", failed_stage=stage.name, error=error_summary(error))

    def interrupt(self, reason: str) -> None:
        """A signal came, inside a stage or between two."""
        for number, entry in enumerate(self._entries):
            if entry["status"] == "running":
                self._entries[number] = self._read(self.config.stages[number], "interrupted")
        self.write("interrupted", f"{reason}; go on with --resume")

    def write(self, status: str, reason: str, **more: Any) -> dict[str, Any]:
        """Replace the file; returns its content."""
        finished = [entry for entry in self._entries if entry["status"] == "finished"]
        content = {
            "name": self.config.name,
            "status": status,
            "exit_reason": reason,
            "steps": sum(entry.get("steps", 0) for entry in self._entries),
            "seconds": round(time.monotonic() - self._began_s, 3),
            "started": self._started,
            "metrics": _first_and_last(self._entries),
            "stages": self._entries,
            **({"export": finished[-1]["export"]} if finished and "export" in finished[-1] else {}),
            **more,
        }
        write_json(self.config.run_dir / "summary.json", content)
        return content

    def _read(self, stage: RunConfig, status: str) -> dict[str, Any]:
        entry: dict[str, Any] = {"name": stage.name, "folder": str(stage.run_dir), "status": status}
        summary = read_summary(stage.run_dir) if status != "waiting" else {}
        entry |= {key: summary[key] for key in ("exit_reason", "steps", "seconds", "export") if key in summary}
        metrics = summary.get("metrics", {})
        return {**entry, "metrics": {name: {k: one[k] for k in ("first", "last")} for name, one in metrics.items()}}


def _first_and_last(entries: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each metric, the first value in the first stage that has it and the last in the last, with the stages."""
    found: dict[str, dict[str, Any]] = {}
    for entry in entries:
        for name, one in entry["metrics"].items():
            held = found.setdefault(name, {"first": one["first"], "first_stage": entry["name"]})
            held |= {"last": one["last"], "last_stage": entry["name"]}
    return found
