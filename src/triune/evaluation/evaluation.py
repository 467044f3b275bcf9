"""Evaluation of one version at a time, on every held-out task once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from triune.errors import ConfigError, EngineError
from triune.evaluation.config import EvalSettings
from triune.evaluation.results import SetResult, TaskResult, overall_reward, result_of_group
from triune.monitor import cut_torn_line
from triune.ports import Monitor, Rollouts, Sampling, WeightUpdate
from triune.records import Group, GroupId, Task
from triune.tasks import OpenTaskset

Serve = Callable[[WeightUpdate], Awaitable[None]]
"""Makes the engine under the rollouts serve a version."""


class Evaluation:
    """Measures versions on the held-out task sets; implements the port `Evaluator`.

    Every task is run once per version with `samples` rollouts. Group ids do not depend on the version, so that two
    versions, and two runs with one seed, are measured with the same random numbers: less noise in their difference.

    Args:
        settings: The section `eval`.
        tasksets: Opened from `settings.tasks`; names differ from those of training.
        rollouts: Runs rollouts on an engine that serves the version being measured.
        run: Name of the run, for ids.
        sampling: How training samples; the settings change single fields.
        monitor: Where metrics go, as role `eval`.
        folder: The run's folder, for `eval.jsonl`; None = no file.
        start_step: Step the run goes on from. What was measured there or earlier is not due again.
        serve: Brings a version to the engine under `rollouts`; needed with `during: copy`.

    Raises:
        ConfigError: An endless task set without `limit`.
    """

    def __init__(
        self,
        settings: EvalSettings,
        tasksets: Sequence[OpenTaskset],
        rollouts: Rollouts,
        *,
        run: str,
        sampling: Sampling,
        monitor: Monitor | None = None,
        folder: Path | None = None,
        start_step: int = 0,
        serve: Serve | None = None,
    ) -> None:
        self.settings, self.tasksets = settings, tasksets
        self._rollouts, self._run, self._monitor, self._serve = rollouts, run, monitor, serve
        self.sampling = settings.sampling(sampling)
        self._rows = None if folder is None else folder / "eval.jsonl"
        self._last = start_step if self._was_measured(start_step) else start_step - 1
        self._background: asyncio.Task[Any] | None = None
        check_sizes(settings, tasksets)

    # ---- when

    def is_due(self, step: int) -> bool:
        """Whether a version published after this step is to be measured now.

        True for the first version at or after every multiple of `every`, so that an explorer that skips versions
        skips no evaluation. Always False with `during: checkpoint`, which measures afterwards.
        """
        return self.settings.during != "checkpoint" and self._is_new(step, self._last)

    def due_checkpoints(self, steps: Iterable[int]) -> list[int]:
        """The steps of those checkpoints that `during: checkpoint` measures."""
        chosen, last = [], -1
        for step in sorted(steps):
            if self._is_new(step, last):
                chosen.append(step)
                last = step
        return chosen

    def _is_new(self, step: int, last: int) -> bool:
        every = self.settings.every
        if not every or step <= last:
            return False
        return self.settings.at_start if step == 0 else step // every > max(last, 0) // every

    def _was_measured(self, step: int) -> bool:
        if self._rows is None or not self._rows.is_file():
            return False
        with self._rows.open("rb") as lines:
            return any(row.get("kind") == "set" and row.get("step") == step for row in map(_read_row, lines))

    # ---- what

    async def evaluate(self, update: WeightUpdate) -> Mapping[str, float]:
        """Measure a version; with `during: copy` start to, and return {} as soon as the second engine serves it.

        At most one evaluation runs in the background: the next one waits for it, because a version can only be
        fetched while it is published.

        Raises:
            EngineError: Tokens were sampled by other weights than those of `update`.
            ConfigError: The reward has no part `eval.part`.
        """
        self._last = max(self._last, update.step)
        if self.settings.during != "copy":
            return await self.measure(update)
        assert self._serve is not None, "`during: copy` needs an engine of its own"
        await self.finish()
        await self._serve(update)
        self._background = asyncio.create_task(self.measure(update), name=f"evaluation of version {update.version}")
        return {}

    async def finish(self) -> None:
        """Wait for the evaluation in the background, and raise what it raised."""
        running, self._background = self._background, None
        if running is not None:
            await running

    async def measure(self, update: WeightUpdate) -> dict[str, float]:
        """Run every task on the served version, log the metrics, write the rows, and return the metrics."""

        visits: Counter[tuple[str, str]] = Counter()  # equal rows share a key, and are measured as often as they stand

        async def run_task(task: Task) -> TaskResult:
            place = (task.taskset, task.key)
            group = GroupId(self._run, *place, visits[place])
            visits[place] += 1
            num = self.settings.samples
            outcome = await self._rollouts.run(group, task, num=num, sampling=self.sampling, training=False)
            if outcome.group is not None:
                check_served(outcome.group, group, update)
            return result_of_group(task, outcome.group, samples=num, part=self.settings.part)

        results = await measure_sets(self.settings, self.tasksets, run_task)
        row = {"step": update.step, "version": update.version, "digest": update.digest, "epoch": update.epoch}
        return self.record(results, row, step=update.step)

    def record(self, results: Sequence[SetResult], row: Mapping[str, Any], *, step: int) -> dict[str, float]:
        """Log what was measured and append it to `eval.jsonl`; `row` says on which weights."""
        metrics = {f"eval/{each.taskset}/{name}": value for each in results for name, value in each.metrics().items()}
        total = overall_reward(results)
        if total is not None:
            metrics["eval/reward"] = total
        if self._rows is not None:
            with self._rows.open("a+b") as file:
                cut_torn_line(file.fileno())
                file.write(b"".join(_rows_of(results, row)))
        if self._monitor is not None:
            self._monitor.log(metrics, role="eval", step=step)
        return metrics


async def measure_sets(
    settings: EvalSettings, tasksets: Sequence[OpenTaskset], run_task: Callable[[Task], Awaitable[TaskResult]]
) -> list[SetResult]:
    """Run every task of every set once, a bounded number at a time; results are in the order of the rows."""
    room = asyncio.Semaphore(max(1, settings.max_rollouts // settings.samples))

    async def run_in_turn(task: Task) -> TaskResult:
        try:
            return await run_task(task)
        finally:
            room.release()

    found: list[list[asyncio.Task[TaskResult]]] = []
    try:
        async with asyncio.TaskGroup() as running:
            for taskset in tasksets:
                found.append([])
                for task in taskset.all(settings.limit):
                    await room.acquire()
                    found[-1].append(running.create_task(run_in_turn(task)))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [
        SetResult(
            taskset=taskset.name,
            weight=taskset.settings.weight,
            samples=settings.samples,
            pass_threshold=settings.pass_threshold,
            tasks=tuple(task.result() for task in tasks),
        )
        for taskset, tasks in zip(tasksets, found, strict=True)
    ]


def check_sizes(settings: EvalSettings, tasksets: Sequence[OpenTaskset]) -> None:
    """Raise ConfigError when a set would never end."""
    for taskset in tasksets:
        if taskset.size is None and settings.limit is None:
            found = f"the task set {taskset.name!r} is endless"
            raise ConfigError(
                "eval.limit", found, "how many of its tasks to measure", "set `eval.limit`, or its `size`"
            )


def check_served(group: Group, asked: GroupId, update: WeightUpdate) -> None:
    """Raise EngineError when a group is another task's, or sampled by other weights than those being measured."""
    where = f"evaluation of version {update.version}"
    if group.id != asked:
        raise EngineError(where, f"got the group {group.id}", str(asked))
    for experience in group.experiences:
        versions = experience.versions[experience.action_mask]
        if versions.size and not (versions == update.version).all():
            found = f"{experience.id} was sampled by versions {sorted(set(versions.tolist()))}"
            raise EngineError(where, found, f"version {update.version} throughout")


def _rows_of(results: Sequence[SetResult], row: Mapping[str, Any]) -> Iterable[bytes]:
    for each in results:
        about = {**row, "taskset": each.taskset}
        for task in each.tasks:
            yield msgspec.json.encode({"kind": "task", **about, **msgspec.to_builtins(task)}) + b"\n"
        yield msgspec.json.encode({"kind": "set", **about, **each.metrics()}) + b"\n"


def _read_row(line: bytes) -> Mapping[str, Any]:
    """A row of `eval.jsonl`; a line cut short by a crash is no row."""
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError:
        return {}
