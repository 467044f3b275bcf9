"""Reinforcement fine-tuning of LLM agents that keep learning from experience.

Here is what a user's file imports: decorators that mark bricks, the records they meet, and `run`. `import triune` loads
nothing heavy; a name is loaded when it is first used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from triune.explorer.model import Chat, Model
    from triune.launcher.door import run
    from triune.ports import Reward
    from triune.records import Experience, Group, Task

__version__ = "0.1.0"

T = TypeVar("T")

_LAZY = {
    "Chat": "triune.explorer.model",
    "Experience": "triune.records",
    "Group": "triune.records",
    "Model": "triune.explorer.model",
    "Reward": "triune.ports",
    "Task": "triune.records",
    "run": "triune.launcher.door",
}

__all__ = ["Chat", "Experience", "Group", "Model", "Reward", "Task", "operator", "reward", "run", "workflow"]


def workflow(name: str | None = None) -> Callable[[T], T]:
    """Mark a function or frozen dataclass `(task, model)` as the workflow `name`; default: its own name."""
    return _mark("workflow", name)


def reward(name: str | None = None) -> Callable[[T], T]:
    """Mark a function or frozen dataclass `(task, answer)` as the reward `name`."""
    return _mark("reward", name)


def operator(name: str | None = None) -> Callable[[T], T]:
    """Mark a function or frozen dataclass `(group)` or `(experience)` as the operator `name`."""
    return _mark("operator", name)


def _mark(kind: str, name: str | None) -> Callable[[T], T]:
    from triune.registry import brick

    if callable(name):  # written without parentheses: `@workflow`
        return brick(kind)(name)
    return brick(kind, name)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
