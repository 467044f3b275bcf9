"""Measuring many versions in turn, or a model behind an endpoint."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from triune.errors import ConfigError, EngineError, RewardError
from triune.evaluation.config import EvalSettings
from triune.evaluation.evaluation import Evaluation, Serve, check_sizes, measure_sets
from triune.evaluation.results import SetResult, TaskResult, mean_parts, part_of
from triune.ports import Reward, Sampling, WeightUpdate
from triune.records import Task
from triune.tasks import OpenTaskset, TaskBricks

log = logging.getLogger("triune.evaluation")


class Answerer(Protocol):
    """Answers a task as text: an OpenAI-compatible endpoint."""

    async def answer(self, task: Task, sampling: Sampling) -> str:
        """The answer to the task's question; raises EngineError when there is none."""
        ...


async def bench(evaluation: Evaluation, updates: Iterable[WeightUpdate], serve: Serve) -> list[dict[str, Any]]:
    """Measure several versions, for example all checkpoints of a run.

    Args:
        evaluation: Its rollouts run on the engine that `serve` brings a version to.
        updates: The versions.
        serve: Makes the engine serve one.

    Returns:
        One row per version and task set: `version`, `step`, `taskset`, then the metrics of `SetResult.metrics`.
    """
    rows = []
    for update in updates:
        await serve(update)
        metrics = await evaluation.measure(update)
        for taskset in evaluation.tasksets:
            prefix = f"eval/{taskset.name}/"
            own = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
            rows.append({"version": update.version, "step": update.step, "taskset": taskset.name, **own})
    return rows


async def bench_endpoint(
    settings: EvalSettings,
    tasksets: Sequence[OpenTaskset],
    answerer: Answerer,
    *,
    bricks: TaskBricks,
    sampling: Sampling,
    model: str,
) -> list[dict[str, Any]]:
    """Measure a model behind an endpoint: one question, one answer, scored by the task's reward.

    Its tokens and weights are not known, so rows name the model instead of a version, and have no `response_length`.

    Returns:
        One row per task set: `model`, `taskset`, then the metrics.

    Raises:
        ConfigError: A task has no reward, or one that compares whole groups and gets a single sample.
        EngineError: The endpoint answered nothing at all. Single failures are invalid, and the first one is logged.
    """
    check_sizes(settings, tasksets)
    chosen = settings.sampling(sampling)
    errors: list[EngineError] = []
    num_answers = 0

    async def run_task(task: Task) -> TaskResult:
        nonlocal num_answers
        tried = await asyncio.gather(*(_answer(answerer, task, chosen) for _ in range(settings.samples)))
        answers = [answer for answer in tried if isinstance(answer, str)]
        errors.extend(error for error in tried if not isinstance(error, str))
        num_answers += len(answers)
        rewards = await _score(bricks, task, answers)
        valid = [reward for reward in rewards if reward is not None and reward.is_valid]
        part = settings.part
        return TaskResult(
            key=task.key,
            rewards=tuple(each.total if part is None else part_of(each.parts, part, task) for each in valid),
            num_invalid=settings.samples - len(valid),
            parts=mean_parts([each.parts for each in valid]),
        )

    results = await measure_sets(settings, tasksets, run_task)
    if errors and not num_answers:
        raise errors[0]
    if errors:
        log.warning(
            "%d of %d questions got no answer; the first: %s", len(errors), len(errors) + num_answers, errors[0]
        )
    return [{"model": model, "taskset": each.taskset, **_known(each)} for each in results]


def _known(result: SetResult) -> dict[str, float]:
    unknown = ("response_length", "truncated_ratio")
    return {name: value for name, value in result.metrics().items() if name not in unknown}


async def _answer(answerer: Answerer, task: Task, sampling: Sampling) -> str | EngineError:
    try:
        return await answerer.answer(task, sampling)
    except EngineError as error:
        return error


async def _score(bricks: TaskBricks, task: Task, answers: Sequence[str]) -> list[Reward | None]:
    """A reward for each answer; None where the verifier failed."""
    scorer = bricks.reward(task)
    if scorer is None:
        where = f"tasks.reward of {task.taskset}"
        raise ConfigError(where, "there is none", "the reward that scores an answer", "name one: reward: {use: …}")
    try:
        if scorer.per_group:
            return list(await scorer.score_group(task, answers))
        return [await _one(scorer, task, answer) for answer in answers]
    except RewardError:
        return [None] * len(answers)


async def _one(scorer: Any, task: Task, answer: str) -> Reward | None:
    try:
        return await scorer.score(task, answer)
    except RewardError:
        return None
