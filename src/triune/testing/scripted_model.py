"""A model that says what it is told, for tests of workflows without weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from triune.explorer.model import Model
from triune.explorer.session import Answer
from triune.records import Stop


class ScriptedModel(Model):
    """Answers with the given texts, one per call; remembers what it was asked.

    Attributes:
        asked: The messages of every call.
        metrics: What the workflow noted.
    """

    __slots__ = ("asked", "metrics")

    def __init__(self, answers: Iterable[str]) -> None:
        self.asked: list[Any] = []
        self.metrics: dict[str, float] = {}
        super().__init__(_Script(list(answers), self.asked, self.metrics))


class _Script:
    def __init__(self, answers: list[str], asked: list[Any], metrics: dict[str, float]) -> None:
        self._answers, self._asked, self._metrics = answers, asked, metrics

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any] | None,
        key: str,
    ) -> Answer:
        return self._next(list(messages))

    async def generate(self, prompt: Any, options: Mapping[str, Any] | None, key: str) -> Answer:
        return self._next(prompt)

    def _next(self, prompt: Any) -> Answer:
        turn = len(self._asked)
        assert turn < len(self._answers), (
            f"the workflow made call {turn + 1} and the script has {len(self._answers)} answers"
        )
        self._asked.append(prompt)
        text = self._answers[turn]
        return Answer(
            text=text, tokens=np.frombuffer(text.encode(), np.uint8).astype(np.int32), stop=Stop.DONE, turn=turn
        )

    def note_turn(self, *, reward: float | None = None, state_key: str | None = None) -> None:
        """Turn rewards are not kept."""

    def note(self, **metrics: float) -> None:
        for name, value in metrics.items():
            self._metrics[name] = self._metrics.get(name, 0.0) + value

    def end(self, stop: Stop) -> None:
        """Stops are not kept."""
