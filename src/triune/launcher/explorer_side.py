"""Build the explorer's half of a run: engine, scheduler, pipeline, evaluation, loop."""

from __future__ import annotations

import math
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from triune.algorithms import Algorithm
from triune.buffer import StoredBuffer
from triune.buffer.entries import MAIN
from triune.config import RunConfig
from triune.errors import ConfigError, EngineError
from triune.evaluation import Evaluation
from triune.explorer import Explorer, Scheduler, WaveGate
from triune.explorer.demonstrations import Demonstrations, Stored
from triune.explorer.expert_answers import EXPERT, ExpertAnswers
from triune.explorer.row_reader import RowReader
from triune.explorer.runners import RunnerPool
from triune.launcher.tasks import Tasks, workflow_finder
from triune.models import ChatTokenizer, max_positions
from triune.monitor import RunMonitor
from triune.pipelines import Pipeline
from triune.ports import AdmissionRule, Buffer, Engine, Lane, Rollouts, WeightChannel, WeightUpdate
from triune.records import GroupId, Task

AHEAD_STEPS = 4
"""Steps for which demonstrations are prepared ahead: they have no version that could become stale."""


def is_imitation(algorithm: Algorithm) -> bool:
    """Whether an algorithm learns from what rows of the task sets hold, so that nothing is sampled."""
    return algorithm.unit != "task"


def is_stored(config: RunConfig) -> bool:
    """Whether a run trains only on buffers that were filled before, so that nobody puts anything."""
    return MAIN not in getattr(config.algorithm.sampling, "buffers", (MAIN,))


def feeds_itself(config: RunConfig) -> bool:
    """Whether a trainer alone has all that it trains on."""
    return is_imitation(config.algorithm) or is_stored(config)


def filled_buffers(config: RunConfig) -> set[str]:
    """Buffers that are put to while the run lasts."""
    return {MAIN} if config.expert is None else {MAIN, EXPERT}


def groups_per_step(config: RunConfig) -> int:
    """Entries one step consumes."""
    return config.trainer.entries_per_step


def admission_rule(config: RunConfig) -> AdmissionRule:
    """How far exploring may run ahead (CONTRACTS C5)."""
    per_step = groups_per_step(config)
    fresh = per_step * getattr(config.algorithm.sampling, "fresh_ratio", 1.0)
    steps = config.trainer.steps
    staleness = AHEAD_STEPS if is_imitation(config.algorithm) else config.sync.max_staleness
    limit = None if steps is None else math.ceil(fresh * steps - 1e-9)
    return AdmissionRule(max_staleness=staleness, fresh=fresh * config.sync.every, limit=limit)


def build_pipeline(config: RunConfig) -> Pipeline:
    """The run's operators, and after them what the algorithm's advantage does to a group.

    One that the trainer finishes (`where` is `trainer`) may have a part for the group too: the mean before a deviation.
    """
    advantage = config.algorithm.advantage
    last: list[Any] = [advantage] if callable(advantage) else []
    return Pipeline([*config.pipeline, *last])


def load_tokenizer(config: RunConfig, location: str | Path) -> ChatTokenizer:
    """Tokenizer and chat template of the run's model."""
    return ChatTokenizer.load(
        location, template=config.model.chat_template, trust_remote_code=config.model.trust_remote_code
    )


def with_engine_dtype(config: RunConfig, published: str) -> RunConfig:
    """An engine whose dtype is `auto` computes in what is published."""
    engine = config.explorer.engine
    if getattr(engine, "dtype", None) != "auto":
        return config
    engine = replace(engine, dtype=published)
    return config.model_copy(update={"explorer": config.explorer.model_copy(update={"engine": engine})})


def build_engine(config: RunConfig, tokenizer: ChatTokenizer, lane: Lane) -> Engine:
    """The engine that the run file names; in deterministic runs behind a gate that makes waves."""
    engine = config.explorer.engine(
        config.model.path,
        tokenizer.hf,
        lane,
        keep_kv=config.sync.kv == "keep",
        trust_remote_code=config.model.trust_remote_code,
    )
    return WaveGate(engine) if config.deterministic else engine


@dataclass(frozen=True, kw_only=True)
class ExplorerSide:
    """What explores, and what must be closed afterwards.

    Attributes:
        loop: Explores, turns rows into experience, or says that all experience is there.
        follower: Measures versions beside the last two; an `Explorer` does that itself.
        answers: Puts the expert's answers beside what is sampled; None = there are none.
        schedulers: Of training, and of a second engine for evaluation.
        engines: Likewise.
        evaluation: None when nothing is measured.
    """

    loop: Explorer | Demonstrations | Stored
    follower: Coroutine[Any, Any, None] | None
    schedulers: list[Scheduler]
    engines: list[Engine]
    evaluation: Evaluation | None
    answers: ExpertAnswers | None = None

    async def close(self) -> None:
        """Wait for nothing; end runner processes and free the engines."""
        for scheduler in self.schedulers:
            await scheduler.close()
        for engine in self.engines:
            await engine.close()


def build_scheduler(config: RunConfig, engine: Engine, tokenizer: ChatTokenizer, tasks: Tasks) -> Scheduler:
    """A scheduler with runner processes, unless everything is to run inline."""
    explorer = config.explorer
    inline = explorer.runner == "inline" or config.deterministic
    return Scheduler(
        engine=engine,
        tokenizer=tokenizer,
        workflows=workflow_finder(tasks.bricks, portable=tasks.portable),
        settings=explorer,
        seed=config.seed,
        runners=None if inline else RunnerPool(explorer.runners, grace_s=explorer.grace_s),
        greedy_member=config.algorithm.has_greedy_member,
    )


def build_evaluation(
    config: RunConfig, tasks: Tasks, rollouts: Rollouts, monitor: RunMonitor | None, folder: Path | None, **more: Any
) -> Evaluation:
    """Evaluation on the run's held-out tasks."""
    return Evaluation(
        config.eval,
        tasks.held_out,
        rollouts,
        run=config.name,
        sampling=config.explorer.sampling(),
        monitor=monitor,
        folder=folder,
        **more,
    )


def build_explorer_side(
    config: RunConfig,
    *,
    tasks: Tasks,
    tokenizer: ChatTokenizer,
    buffer: StoredBuffer,
    channel: WeightChannel,
    lane: Lane,
    monitor: RunMonitor,
    folder: Path,
    start_step: int,
) -> ExplorerSide:
    """Wire everything between a task and the buffer."""
    rule = admission_rule(config)
    measures = bool(config.eval.every) and config.eval.during != "checkpoint"
    offline = None
    if is_stored(config):
        offline = Stored(buffer)
    elif is_imitation(config.algorithm):
        offline = _demonstrations(config, tasks, tokenizer, buffer, rule, monitor)
    if offline is not None and not measures:
        return ExplorerSide(loop=offline, follower=None, schedulers=[], engines=[], evaluation=None)
    engine = build_engine(config, tokenizer, lane)
    scheduler = build_scheduler(config, engine, tokenizer, tasks)
    schedulers, engines, evaluation = [scheduler], [engine], None
    if measures:
        rollouts, more = scheduler, {}
        if config.eval.during == "copy":
            second = build_engine(config, tokenizer, lane)
            rollouts = build_scheduler(config, second, tokenizer, tasks)
            schedulers.append(rollouts)
            engines.append(second)

            async def serve(update: WeightUpdate) -> None:
                await second.swap(update, await channel.fetch(update))

            more = {"serve": serve}
        evaluation = build_evaluation(config, tasks, rollouts, monitor, folder, start_step=start_step, **more)
    if offline is not None:
        assert evaluation is not None, "without one, this point is not reached"
        follower = measure_versions(buffer, channel, engine, evaluation)
        return ExplorerSide(
            loop=offline, follower=follower, schedulers=schedulers, engines=engines, evaluation=evaluation
        )
    loop = Explorer(
        tasks=tasks.stream,
        buffer=buffer,
        scheduler=scheduler,
        engine=engine,
        channel=channel,
        apply=build_pipeline(config).apply,
        rule=rule,
        group_size=config.algorithm.num_members,
        monitor=monitor,
        style=config.sync.style,
        max_stale_retries=config.sync.max_stale_retries,
        evaluator=evaluation,
        deterministic=config.deterministic,
        max_dropped=config.explorer.max_dropped,
    )
    return ExplorerSide(
        loop=loop,
        follower=None,
        schedulers=schedulers,
        engines=engines,
        evaluation=evaluation,
        answers=_expert_answers(config, tasks, tokenizer, buffer),
    )


async def measure_versions(buffer: Buffer, channel: WeightChannel, engine: Engine, evaluation: Evaluation) -> None:
    """Measure the versions that are due.

    consumes: versions of weights   waits for: a newer version
    produces: rows of eval.jsonl    unblocked by: the trainer's publish, or its end
    """
    served = -1
    while (update := await buffer.wait_version(served)) is not None:
        if evaluation.is_due(update.step):
            try:
                tensors = await channel.fetch(update)
            except EngineError:
                continue  # overtaken while this one was looked up; the next one is measured instead
            await engine.swap(update, tensors)
            await evaluation.evaluate(update)
        served = update.version
    await evaluation.finish()


def question_of(tasks: Tasks, task: Task) -> list[dict[str, Any]]:
    """Messages that a task's workflow would put to the model.

    Raises:
        ConfigError: It is a function, or an agent that asks as it goes.
    """
    workflow = tasks.bricks.workflow(task)
    if not hasattr(workflow, "messages"):
        raise ConfigError(
            f"tasks.workflow of {task.taskset}",
            "an agent's workflow has no single question",
            "single_turn or math, or rows with `messages`",
            "name one of them for these tasks",
        )
    return workflow.messages(task)


def _expert_answers(
    config: RunConfig, tasks: Tasks, tokenizer: ChatTokenizer, buffer: StoredBuffer
) -> ExpertAnswers | None:
    if tasks.expert is None:
        return None
    return ExpertAnswers(
        run=config.name,
        tasks=tasks.expert,
        stock=buffer,
        reader=row_reader(config, tasks, tokenizer, reads="answers"),
        ahead=2 * groups_per_step(config),
    )


def _demonstrations(
    config: RunConfig, tasks: Tasks, tokenizer: ChatTokenizer, buffer: Buffer, rule: AdmissionRule, monitor: RunMonitor
) -> Demonstrations:
    reader = row_reader(config, tasks, tokenizer)
    return Demonstrations(tasks=tasks.stream, buffer=buffer, reader=reader, rule=rule, monitor=monitor)


def row_reader(config: RunConfig, tasks: Tasks, tokenizer: ChatTokenizer, *, reads: str = "") -> RowReader:
    """What makes records of rows that hold answers, by default those that the algorithm reads."""
    positions = max_positions(config.model) or 1 << 20
    return RowReader(
        tokenizer=tokenizer,
        prompt_of=lambda task: question_of(tasks, task),
        reads=reads or config.algorithm.reads,
        max_tokens=min(getattr(config.algorithm, "max_tokens", None) or positions, positions),
    )


def check_rows(config: RunConfig, tasks: Tasks, tokenizer: ChatTokenizer) -> None:
    """Read every set's first row, so that a run that cannot work ends before it begins.

    Raises:
        TaskError: It lacks what the algorithm reads.
        ConfigError: Its workflow has no question to put before an answer.
    """
    read = row_reader(config, tasks, tokenizer)
    for taskset in tasks.training:
        first = taskset.tasks([0])[0]
        read(GroupId(config.name, taskset.name, first.key, 0), first)
