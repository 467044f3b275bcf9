"""Sums and products, made as they are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from triune.registry import brick, brick_field
from triune.tasks.counter_random import mix, uniform_integers
from triune.tasks.rewards.exact_match import ExactMatch
from triune.tasks.taskset import Taskset


@brick("taskset")
@dataclass(frozen=True, kw_only=True)
class Arithmetic(Taskset):
    """Problems like `12+34=` with answer `46`, drawn with a counter-based generator.

    Row i depends on nothing but the settings, the seed and i, so an endless set costs no memory, resumes anywhere and
    is the same on every machine. Data: `question`, `answer`, `expression`.

    Attributes:
        operands: How many numbers.
        digits: Numbers have up to so many digits.
        max: Largest number; overrides `digits`.
        ops: Drawn between the numbers, each equally often; `*` binds tighter.
        prompt: The question, with `{expression}` in it.
        size: How many rows; None = endless.
        seed: None = the run's, so that sets of different names (training, evaluation) differ.
    """

    operands: Annotated[int, Field(ge=2)] = 2
    digits: Annotated[int, Field(ge=1, le=15)] = 2
    max: Annotated[int, Field(ge=1, lt=10**15)] | None = None
    ops: list[Literal["+", "-", "*"]] = field(default_factory=lambda: ["+"])
    prompt: str = "{expression}="
    size: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    reward: Any = brick_field("reward", ExactMatch())

    def open(self, seed: int, where: str) -> ArithmeticRows:
        """Nothing is read; rows are made when asked for."""
        return ArithmeticRows(self, seed if self.seed is None else mix(self.seed))

    def _first_fields(self) -> frozenset[str]:
        return frozenset({"question", "answer", "expression"})


class ArithmeticRows:
    """Generated rows."""

    has_keys = True
    block = 256

    def __init__(self, settings: Arithmetic, seed: int) -> None:
        self._settings, self._seed = settings, seed
        self.size = settings.size
        shape = (settings.operands, settings.digits, settings.max, settings.ops, settings.prompt)
        self.content_hash = f"arithmetic {seed} {shape}"

    def read(self, numbers: Sequence[int]) -> list[Mapping[str, Any]]:
        """Rows by number."""
        settings = self._settings
        rows, width = np.asarray(numbers, dtype=np.uint64)[:, None], 2 * settings.operands
        counters = rows * np.uint64(width) + np.arange(width, dtype=np.uint64)
        largest = settings.max if settings.max is not None else 10**settings.digits - 1
        values = uniform_integers(self._seed, counters[:, : settings.operands], largest + 1).tolist()
        ops = uniform_integers(self._seed, counters[:, settings.operands : -1], len(settings.ops)).tolist()
        return [
            self._row(terms, [settings.ops[op] for op in chosen]) for terms, chosen in zip(values, ops, strict=True)
        ]

    def _row(self, terms: list[int], ops: list[str]) -> Mapping[str, Any]:
        expression, total, product = str(terms[0]), 0, terms[0]
        for op, term in zip(ops, terms[1:], strict=True):
            expression = f"{expression}{op}{term}"
            if op == "*":
                product *= term
            else:
                total, product = total + product, term if op == "+" else -term
        question = self._settings.prompt.replace("{expression}", expression)
        return {"question": question, "answer": str(total + product), "expression": expression}

    def place(self, number: int) -> str:
        """`arithmetic: row n`."""
        return f"arithmetic: row {number}"
