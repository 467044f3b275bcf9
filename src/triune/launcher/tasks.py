"""The tasks of a run, for training and for evaluation, with the workflow and reward of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from triune.config import RunConfig
from triune.errors import ConfigError
from triune.explorer import BoundWorkflow, bind_workflow
from triune.explorer.workflows.single_turn import SingleTurn
from triune.records import Task
from triune.tasks import MixedTasks, OpenTaskset, TaskBricks, build_stream, open_tasksets


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """Opened task sets.

    Attributes:
        stream: Training tasks in order.
        training: The sets behind it.
        expert: Rows of the section `expert` in the order in which they are read; None = there is none.
        held_out: The sets of `eval.tasks`.
        bricks: Workflow and reward of any of their tasks.
        portable: Whether runner processes may import them; functions passed from Python run in this process.
    """

    stream: MixedTasks
    training: list[OpenTaskset]
    held_out: list[OpenTaskset]
    bricks: TaskBricks
    expert: MixedTasks | None = None
    portable: bool = True

    @property
    def data_hash(self) -> str:
        """Over all rows that are trained on."""
        return self.stream.data_hash + ("" if self.expert is None else f"+{self.expert.data_hash}")


def open_tasks(config: RunConfig, *, workflow: Any = None, reward: Any = None) -> Tasks:
    """Read all task sets.

    Args:
        config: The run.
        workflow: What was passed to `triune.run(workflow=…)`; stands above what sets name.
        reward: Likewise.

    Raises:
        TaskError: A file is missing, empty or malformed.
    """
    training = open_tasksets(config.tasks, seed=config.seed)
    evaluated = config.eval.tasks
    held_out = (
        [] if evaluated is None else open_tasksets(evaluated, seed=config.seed, default="eval", where="eval.tasks")
    )
    expert, answers = _open_expert(config)
    sets = [*training, *held_out, *expert]
    bricks = TaskBricks(sets, default_workflow=SingleTurn(), workflow=workflow, reward=reward)
    return Tasks(
        stream=build_stream(config.tasks, training, seed=config.seed),
        training=training,
        held_out=held_out,
        bricks=bricks,
        expert=answers,
        portable=workflow is None and reward is None,
    )


def _open_expert(config: RunConfig) -> tuple[list[OpenTaskset], MixedTasks | None]:
    """The sets of `expert`, whose questions are put as those that are trained on, and their rows in order."""
    if config.expert is None:
        return [], None
    asked = [each.workflow for each in config.tasks.sets]
    if any(workflow != asked[0] for workflow in asked):
        missing = [number for number, each in enumerate(config.expert.sets) if each.workflow is None]
        if missing:
            raise ConfigError(
                f"expert.sets.{missing[0]}.workflow",
                "found none, and the task sets that are trained on have several",
                "the one that puts these questions",
                "write the workflow of the tasks that these answers belong to",
            )
    sets = tuple(each if each.workflow is not None else replace(each, workflow=asked[0]) for each in config.expert.sets)
    settings = config.expert.model_copy(update={"sets": sets})
    opened = open_tasksets(settings, seed=config.seed, default="expert", where="expert")
    return opened, build_stream(settings, opened, seed=config.seed)


def check_workflows(tasks: Tasks) -> None:
    """Bind the workflow of every set's first row, so that a run that cannot work ends before it begins.

    Raises:
        ConfigError: A workflow lacks its reward, ignores one, or does not exist.
    """
    find = workflow_finder(tasks.bricks)
    for taskset in (*tasks.training, *tasks.held_out):
        find(taskset.tasks([0])[0])


def workflow_finder(bricks: TaskBricks, *, portable: bool = True) -> Callable[[Task], BoundWorkflow]:
    """The bound workflow of a task, each built once."""
    bound: dict[tuple[int, int], BoundWorkflow] = {}

    def find(task: Task) -> BoundWorkflow:
        workflow, reward = bricks.workflow(task), bricks.reward(task)
        key = (id(workflow), id(reward))  # both are kept alive by `bricks`
        if key not in bound:
            bound[key] = bind_workflow(workflow, reward, where=f"workflow of {task.taskset}", portable=portable)
        return bound[key]

    return find
