"""A workflow with its reward, ready to run: the one place that knows what user code may look like.

A workflow is a class with `__call__` or a function, plain or async, called with `(task, model)`. One that has a
parameter `reward` gets the task set's reward there: `await reward(task, answer)`, or without `await` in a plain
function.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from triune import registry
from triune.errors import ConfigError
from triune.records import Task
from triune.tasks import Scorer, as_reward

_OF_SESSION = {"messages", "experience"}


@dataclass(frozen=True, kw_only=True)
class BoundWorkflow:
    """A workflow with its reward.

    Attributes:
        name: For messages.
        workflow: The user's callable.
        scorer: The reward it asks for; None when it brings its own.
        is_async: Whether it returns an awaitable; a plain one runs in a thread and gets a `BlockingModel`.
        is_ours: Workflow and reward are part of Triune, so that they are known not to block.
        spec: How to make it again in a runner process; None where its code cannot be imported there.
        sees_session: The reward asks for messages or experiences, or scores whole groups: it runs beside the session.
    """

    name: str
    workflow: Callable[..., Any]
    scorer: Scorer | None
    is_async: bool
    is_ours: bool
    spec: Mapping[str, Any] | None
    sees_session: bool

    def call(self, task: Task, model: Any, score: Callable[..., Any] | None = None) -> Any:
        """Start it; `score` replaces its scorer where the reward needs more than the answer."""
        if self.scorer is None:
            return self.workflow(task, model)
        return self.workflow(task, model, reward=score or self.scorer.score)


def bind_workflow(
    workflow: Any, reward: Any = None, *, where: str = "tasks.workflow", portable: bool = True
) -> BoundWorkflow:
    """Join a workflow and the reward it is to use.

    Args:
        workflow: A workflow brick's instance, or a function `(task, model)` or `(task, model, reward)`.
        reward: The task set's reward: a function, a brick or a `Scorer`; None when there is none.
        where: Dotted key for messages.
        portable: Whether runner processes may import it again; False for functions passed from Python.

    Raises:
        ConfigError: It is not callable, needs a reward and has none, or was given one that it ignores.
    """
    name = _name(workflow)
    if not callable(workflow):
        raise ConfigError(where, f"found {workflow!r}", "a workflow: a function or class instance (task, model)")
    wanted = inspect.signature(workflow).parameters.get("reward")
    if wanted is not None and reward is None:
        make = getattr(workflow, "make_reward", None)
        reward = make() if make is not None else None
    if wanted is not None and reward is None and wanted.default is inspect.Parameter.empty:
        raise ConfigError(where, f"{name} scores with a reward and there is none", "", "write `reward: NAME` beside it")
    if wanted is None and reward is not None:
        raise ConfigError(
            where, f"{name} takes no reward, so `reward` would do nothing", "", "remove it, or add a parameter `reward`"
        )
    scorer = None if reward is None else as_reward(reward)
    return BoundWorkflow(
        name=name,
        workflow=workflow,
        scorer=scorer,
        is_async=is_async_callable(workflow),
        is_ours=_is_ours(workflow) and (scorer is None or _is_ours(scorer.function)),
        spec=_spec(workflow, scorer) if portable else None,
        sees_session=scorer is not None and (scorer.per_group or bool(_needs(scorer) & _OF_SESSION)),
    )


def is_async_callable(target: Any) -> bool:
    """Whether calling it gives a coroutine."""
    return inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(getattr(target, "__call__", None))  # noqa: B004


def _needs(scorer: Scorer) -> set[str]:
    return set(inspect.signature(scorer.function).parameters)


def _name(target: Any) -> str:
    kind = getattr(target, "__brick__", None)
    return kind[1] if kind else getattr(target, "__name__", type(target).__name__)


def _is_ours(target: Any) -> bool:
    module = getattr(target, "__module__", None) or type(target).__module__
    return module.partition(".")[0] == "triune"


# ------------------------------------------------------------------------------------- to a runner and back


def _spec(workflow: Any, scorer: Scorer | None) -> Mapping[str, Any] | None:
    """Import paths and fields of both, or None when another process could not import them."""
    described = _describe(workflow)
    reward = None if scorer is None else _describe(scorer.function)
    if described is None or (scorer is not None and reward is None):
        return None
    return {"workflow": described, "reward": reward}


def _describe(target: Any) -> Mapping[str, Any] | None:
    kind = target if inspect.isroutine(target) or inspect.isclass(target) else type(target)
    module, path = kind.__module__, kind.__qualname__
    if module == "__main__" or "<locals>" in path or "<lambda>" in path:
        return None
    fields: dict[str, Any] = {}
    if kind is not target:
        for name, value in registry.fields_of(target).items():
            fields[name] = value
            if hasattr(type(value), "__brick__"):
                nested = _describe(value)
                if nested is None:
                    return None
                fields[name] = {"__brick__": nested}
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    is_instance = kind is not target
    described = {"module": module, "path": path, "file": file, "fields": fields, "is_instance": is_instance}
    try:
        msgspec.msgpack.encode(described)
    except (TypeError, OverflowError):
        return None
    return described


def from_spec(spec: Mapping[str, Any]) -> BoundWorkflow:
    """Make a bound workflow again from `BoundWorkflow.spec`, in another process."""
    reward = None if spec["reward"] is None else _construct(spec["reward"])
    return bind_workflow(_construct(spec["workflow"]), reward)


def _construct(described: Mapping[str, Any]) -> Any:
    target: Any = _load_module(described["module"], described["file"])
    for part in described["path"].split("."):
        target = getattr(target, part)
    if not described["is_instance"]:
        return target
    fields = {
        name: _construct(value["__brick__"]) if isinstance(value, Mapping) and "__brick__" in value else value
        for name, value in described["fields"].items()
    }
    return registry.construct(target, fields, described["path"])


def _load_module(name: str, file: str) -> Any:
    """Import by name, else from the file it was loaded from (plug-in files have no place on the path)."""
    if name in sys.modules:
        return sys.modules[name]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        found = importlib.util.spec_from_file_location(name, file)
        if found is None or found.loader is None:
            raise
        module = importlib.util.module_from_spec(found)
        sys.modules[name] = module
        found.loader.exec_module(module)
        return module
