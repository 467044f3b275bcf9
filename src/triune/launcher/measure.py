"""Measure weights that are on disk, or a model behind an endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triune.config import RunConfig
from triune.errors import CheckpointError, EngineError
from triune.evaluation import Evaluation, bench, bench_endpoint
from triune.explorer.engines.remote import Remote, RemoteEngine
from triune.launcher.explorer_side import (
    build_engine,
    build_evaluation,
    build_scheduler,
    load_tokenizer,
    question_of,
    with_engine_dtype,
)
from triune.launcher.lane import ThreadLane
from triune.launcher.tasks import Tasks, open_tasks
from triune.launcher.trainer_side import find_checkpoints, load_policy, published_dtype
from triune.models import resolve_model, weight_digest
from triune.monitor import RunMonitor
from triune.ports import Engine, Lane, Sampling, WeightUpdate
from triune.records import Stop, Task
from triune.sync.snapshot import snapshot, torch_dtype
from triune.trainer import Checkpoints, read_state

if TYPE_CHECKING:
    from triune.models import ChatTokenizer
    from triune.trainer import Policy


async def measure_checkpoints(
    config: RunConfig,
    folder: Path,
    tasks: Tasks,
    tokenizer: ChatTokenizer,
    lane: Lane,
    monitor: RunMonitor | None,
    *,
    only_due: bool = True,
) -> list[dict[str, Any]]:
    """Evaluate a run's checkpoints with an engine of their own.

    Args:
        config: The run.
        folder: Its folder.
        tasks: Its opened task sets.
        tokenizer: Its tokenizer.
        lane: Where torch runs.
        monitor: Where metrics go; None = only into the rows.
        only_due: Those that `eval.every` asks for; False = all.

    Returns:
        One row per checkpoint and task set.

    Raises:
        CheckpointError: There is no checkpoint.
    """
    checkpoints = find_checkpoints(config, folder)
    if not checkpoints.steps():
        raise CheckpointError(str(checkpoints.folder), "no complete checkpoint", "one at least", "run it first")
    policy = await lane.run(load_policy, config)
    said = getattr(config.sync.channel, "dtype", "auto")
    dtype = published_dtype(config, policy) if said == "auto" else said  # as while the run measured itself
    engine = build_engine(with_engine_dtype(config, dtype), tokenizer, lane)
    scheduler = build_scheduler(config, engine, tokenizer, tasks)
    try:
        evaluation = build_evaluation(config, tasks, scheduler, monitor, folder)
        steps = checkpoints.steps()
        chosen = _due(evaluation, steps) if only_due else steps
        return await _measure(evaluation, checkpoints, policy, engine, lane, chosen, dtype)
    finally:
        await scheduler.close()
        await engine.close()


def _due(evaluation: Evaluation, steps: list[int]) -> list[int]:
    return evaluation.due_checkpoints(steps)


async def _measure(
    evaluation: Evaluation,
    checkpoints: Checkpoints,
    policy: Policy,
    engine: Engine,
    lane: Lane,
    steps: list[int],
    dtype: str,
) -> list[dict[str, Any]]:
    updates = []
    for step in steps:
        state = read_state(checkpoints.path(step))
        version = state.line[-1][0] if state.line else 0
        updates.append(WeightUpdate(version=version, step=step, digest="", dtype=dtype))

    def load(step: int) -> Mapping[str, Any]:
        _, weights, _ = checkpoints.load(checkpoints.path(step))
        policy.load(weights)
        return snapshot(policy.state(), torch_dtype(dtype))[0]

    async def serve(update: WeightUpdate) -> None:
        tensors = await lane.run(load, update.step)
        digest = await lane.run(weight_digest, tensors)
        await engine.swap(
            WeightUpdate(version=update.version, step=update.step, digest=digest, dtype=update.dtype), tensors
        )

    return await bench(evaluation, updates, serve)


async def bench_run(config: RunConfig, folder: Path) -> list[dict[str, Any]]:
    """`triune bench RUN`: all checkpoints of a run."""
    lane = ThreadLane()
    try:
        tasks = open_tasks(config)
        tokenizer = load_tokenizer(config, resolve_model(config.model.path).location)
        return await measure_checkpoints(config, folder, tasks, tokenizer, lane, None, only_due=False)
    finally:
        lane.close()


class EndpointAnswerer:
    """Answers tasks by asking an endpoint with the messages that the task's workflow would put to the policy."""

    def __init__(self, client: RemoteEngine, tasks: Tasks) -> None:
        self._client, self._tasks = client, tasks

    async def answer(self, task: Task, sampling: Sampling) -> str:
        """The text of the answer.

        Raises:
            ConfigError: The task's workflow is no single question.
            EngineError: The endpoint failed, or broke the answer off.
        """
        answer = await self._client.chat(question_of(self._tasks, task), sampling)
        if answer.stop is Stop.ABORTED:
            where = f"task {task.taskset}/{task.key}"
            raise EngineError(
                where, "the endpoint broke its answer off (a filter, or an error there)", "a whole answer"
            )
        return answer.text


async def bench_endpoint_of(config: RunConfig, name: str) -> list[dict[str, Any]]:
    """`triune bench FILE --endpoint NAME`: the run's held-out tasks, put to a model under `models:`."""
    settings, tasks = config.models[name], open_tasks(config)
    client = RemoteEngine(Remote.of(settings))
    try:
        return await bench_endpoint(
            config.eval,
            tasks.held_out,
            EndpointAnswerer(client, tasks),
            bricks=tasks.bricks,
            sampling=config.explorer.sampling(),
            model=settings.model,
        )
    finally:
        await client.close()
