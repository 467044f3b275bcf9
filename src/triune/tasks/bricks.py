"""Which workflow and which reward a task is run with."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from triune import registry
from triune.errors import ConfigError
from triune.records import Task
from triune.tasks.scoring import Scorer, as_reward
from triune.tasks.taskset import OpenTaskset, Taskset


class TaskBricks:
    """Finds the workflow and the reward of a task: the row's own, else its task set's, else the run's.

    Args:
        tasksets: All sets of the run, for training and evaluation; their names differ.
        workflow: For sets that name none; what was passed to `triune.run(workflow=…)` stands above a set's own.
        reward: Likewise.
    """

    def __init__(
        self,
        tasksets: Iterable[OpenTaskset],
        *,
        default_workflow: Any = None,
        workflow: Any = None,
        reward: Any = None,
    ) -> None:
        settings: dict[str, Taskset] = {}
        for taskset in tasksets:
            if taskset.name in settings:
                found = f"two task sets, for training or evaluation, are called {taskset.name!r}"
                raise ConfigError(f"{taskset.where}.name", found, "names that differ: results and ids carry them")
            settings[taskset.name] = taskset.settings
        self._workflows = {name: workflow or each.workflow or default_workflow for name, each in settings.items()}
        self._default = workflow or default_workflow
        self._rewards = {name: _scorer(reward or each.reward) for name, each in settings.items()}
        self._reward = _scorer(reward)
        # A task set's default reward is an offer: a workflow that has none to ask for brings its own.
        self._offered = {name for name, each in settings.items() if reward is None and _is_default(each)}
        self._asks: dict[int, bool] = {}
        self._built: dict[bytes, Any] = {}

    def workflow(self, task: Task) -> Any:
        """The workflow, built; None when nobody names one.

        Raises:
            ConfigError: The row names one that does not exist.
        """
        if task.workflow is None:
            return self._workflows.get(task.taskset, self._default)
        return self._build("workflow", task.workflow, task)

    def reward(self, task: Task) -> Scorer | None:
        """The reward, ready to be called; None when the workflow brings its own.

        Raises:
            ConfigError: The row names one that does not exist.
        """
        if task.reward is not None:
            return self._build("reward", task.reward, task)
        if task.taskset in self._offered and not self._asks_for_reward(self.workflow(task)):
            return None
        return self._rewards.get(task.taskset, self._reward)

    def _asks_for_reward(self, workflow: Any) -> bool:
        """Whether a workflow has a parameter `reward`; None stands for a run without workflows, as of an endpoint."""
        if id(workflow) not in self._asks:  # workflows live as long as this object
            self._asks[id(workflow)] = workflow is None or "reward" in inspect.signature(workflow).parameters
        return self._asks[id(workflow)]

    def _build(self, kind: str, spec: Mapping[str, Any], task: Task) -> Any:
        key = kind.encode() + msgspec.json.encode(spec, order="sorted")
        if key not in self._built:
            made = registry.build(kind, spec, f"task {task.taskset}/{task.key}: {kind}")
            self._built[key] = as_reward(made) if kind == "reward" else made
        return self._built[key]


def _is_default(taskset: Taskset) -> bool:
    default = next(each.default for each in dataclasses.fields(taskset) if each.name == "reward")
    return default is not None and taskset.reward is default


def _scorer(reward: Any) -> Scorer | None:
    return None if reward is None else as_reward(reward)
