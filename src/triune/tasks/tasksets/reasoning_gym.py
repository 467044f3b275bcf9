"""Generators of the package reasoning-gym, each with its own scorer."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from pydantic import Field

from triune.errors import ConfigError, MissingDependency, TaskError
from triune.registry import brick, brick_field
from triune.tasks.counter_random import mix
from triune.tasks.generators import Recipe, load_generator
from triune.tasks.rewards.reasoning_gym import ReasoningGymScore
from triune.tasks.taskset import Taskset


@brick("taskset", "reasoning_gym")
@dataclass(frozen=True, kw_only=True)
class ReasoningGym(Taskset):
    """Rows of any generator of reasoning-gym, scored by that generator unless another reward is named.

    Data: `question`, `answer`, `metadata`, and `recipe`: what the scorer needs to make the row again, because
    metadata that went through a store (tuples, number keys) is not always what a scorer expects.

    Attributes:
        generator: Its name, e.g. `chain_sum`.
        options: Fields of the generator's own configuration, e.g. `{min_terms: 2, max_terms: 2}`.
        size: How many rows.
        seed: None = the run's, so that sets of different names (training, evaluation) differ.

    Source: reasoning-gym, arXiv:2505.24760.
    """

    generator: str
    options: dict[str, Any] = field(default_factory=dict)
    size: Annotated[int, Field(ge=1)] = 10_000
    seed: int | None = None
    reward: Any = brick_field("reward", ReasoningGymScore())

    def open(self, seed: int, where: str) -> ReasoningGymRows:
        """Make the generator; raises ConfigError, or MissingDependency without the package."""
        try:
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise MissingDependency(
                where, "`use: reasoning_gym` needs an optional package", "", "pip install 'triune[reasoning-gym]'"
            ) from error
        if self.generator not in DATASETS:
            near = difflib.get_close_matches(self.generator, DATASETS, n=1)
            do = f"did you mean {near[0]!r}?" if near else "see reasoning_gym.factory.DATASETS"
            raise ConfigError(f"{where}.generator", f"reasoning-gym has no {self.generator!r}", "", do)
        chosen = (seed if self.seed is None else mix(self.seed)) % 2**31
        recipe = Recipe(generator=self.generator, options=self.options, seed=chosen, size=self.size)
        try:
            load_generator(recipe)
        except Exception as error:  # each generator checks its options in its own way
            found = f"{self.generator} refuses {self.options} ({type(error).__name__}: {error})"
            raise ConfigError(f"{where}.options", found, "fields of that generator's configuration") from error
        return ReasoningGymRows(recipe)

    def _first_fields(self) -> frozenset[str]:
        return frozenset({"question", "answer", "metadata", "recipe"})


class ReasoningGymRows:
    """Generated rows, a few at a time: some generators need milliseconds for one."""

    has_keys = True
    block = 4

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.size: int | None = recipe.size
        self.content_hash = f"reasoning_gym {recipe}"

    def read(self, numbers: Sequence[int]) -> list[Mapping[str, Any]]:
        """Rows by number."""
        return [self._row(number) for number in numbers]

    def _row(self, number: int) -> Mapping[str, Any]:
        try:
            row = load_generator(self._recipe)[number]
        except Exception as error:  # a generator's own bug, on this row only
            raise TaskError(self.place(number), f"the generator raised {type(error).__name__}: {error}") from error
        metadata = msgspec.json.decode(msgspec.json.encode(row.get("metadata", {}), enc_hook=_json_like))
        recipe = {**msgspec.to_builtins(self._recipe), "row": number}
        return {"question": row["question"], "answer": row["answer"], "metadata": metadata, "recipe": recipe}

    def place(self, number: int) -> str:
        """`reasoning_gym: row n`."""
        return f"reasoning_gym: row {number}"


def _json_like(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)
