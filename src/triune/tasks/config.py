"""The section `tasks` of a run file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, model_validator

from triune.errors import ConfigError
from triune.settings import BrickOf, Settings
from triune.tasks.counter_random import mix
from triune.tasks.selectors.shuffled import Shuffled
from triune.tasks.stream import MixedTasks
from triune.tasks.taskset import OpenTaskset


class TasksSettings(Settings):
    """What to train on: one task set, a list of them, or `sets` with `order` and `epochs`.

    `{use: jsonl, path: train.jsonl, epochs: 2}` is short for `{sets: [{use: jsonl, path: train.jsonl}], epochs: 2}`.
    """

    sets: tuple[Annotated[Any, BrickOf("taskset")], ...]
    """The task sets, mixed by their `weight`."""

    order: Annotated[Any, BrickOf("selector")] = Shuffled()
    """In which order the rows of a set are visited: `shuffled` (anew every epoch) or `sequential`."""

    epochs: Annotated[int, Field(ge=1)] | None = None
    """How often each set is gone through; null = until the trainer has made its steps."""

    @model_validator(mode="before")
    @classmethod
    def read_short_forms(cls, value: Any) -> Any:
        """Accept one task set, or a list of them."""
        if isinstance(value, Sequence) and not isinstance(value, str):
            value = {"sets": list(value)}
        if isinstance(value, str):
            return {"sets": [value]}
        if isinstance(value, Mapping) and "sets" not in value and "use" in value:
            own = {key: value[key] for key in ("order", "epochs") if key in value}
            return {**own, "sets": [{key: value[key] for key in value if key not in own}]}
        if isinstance(value, Mapping) and "sets" in value and not value["sets"]:
            raise ValueError("found no task set; expected at least one, e.g. {use: jsonl, path: train.jsonl}")
        return value

    def names(self, default: str) -> list[str]:
        """Name of each set: its own, else `default`, numbered when there are several.

        Raises:
            ConfigError: Two sets share a name.
        """
        plain = len(self.sets) == 1
        chosen = [each.name or (default if plain else f"{default}_{i}") for i, each in enumerate(self.sets, 1)]
        twice = sorted({name for name in chosen if chosen.count(name) > 1})
        if twice:
            raise ConfigError(f"{default}.name", f"several task sets are called {twice[0]!r}", "names that differ")
        return chosen


class ExpertSettings(TasksSettings):
    """Answers to imitate beside what is sampled: task sets whose rows hold an `answer`, or `messages` ending with one.

    They go to the buffer `expert`, row after row and again and again, from which an algorithm like `mix` takes its
    share of every step. A set that names no workflow puts its questions as the set that is trained on does.
    """

    @model_validator(mode="after")
    def check_epochs(self) -> ExpertSettings:
        """The run's steps say how many answers are read."""
        if self.epochs is not None:
            raise ValueError("`epochs` has no meaning here: answers are read as long as the run lasts; remove it")
        return self


def open_tasksets(
    settings: TasksSettings, *, seed: int, default: str = "train", where: str = "tasks"
) -> list[OpenTaskset]:
    """Open every set.

    Args:
        settings: The section.
        seed: The run's; each set gets its own, from its name.
        default: Name of a set without one.
        where: Dotted key for messages.

    Raises:
        TaskError: Missing, empty, malformed, or without a mapped field.
        ConfigError: Two sets share a name.
    """
    plain = len(settings.sets) == 1
    return [
        OpenTaskset(each, name, seed=mix(seed, name), where=where if plain else f"{where}.{number}")
        for number, (each, name) in enumerate(zip(settings.sets, settings.names(default), strict=True))
    ]


def build_stream(settings: TasksSettings, tasksets: Sequence[OpenTaskset], *, seed: int) -> MixedTasks:
    """The tasks of opened sets in training order."""
    return MixedTasks(tasksets, order=settings.order, epochs=settings.epochs, seed=seed)
