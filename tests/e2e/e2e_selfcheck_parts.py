"""A workflow, a reward and an environment as users write them, named by import path."""

from __future__ import annotations

import zlib
from typing import Any

from triune import Model, Task
from triune.explorer.workflows.multi_turn import Step


def varied(task: Task, answer: str) -> float:
    """Says something about any answer of a random model."""
    return float(zlib.crc32(answer.encode()) % 2)


def group_ranks(task: Task, answers: list[str]) -> list[float]:
    """Compares the answers of a group."""
    scores = [zlib.crc32(answer.encode()) % 7 for answer in answers]
    return [sum(other < score for other in scores) / max(len(scores) - 1, 1) for score in scores]


async def two_threads(task: Task, model: Model) -> float:
    """Asks in two conversations that know nothing of each other, and scores itself."""
    first, second = model.chat(system="One."), model.chat(system="Two.")
    answers = [
        await chat.ask(f"{task.data['question']} {turn}", max_tokens=4) for turn in range(2) for chat in (first, second)
    ]
    return varied(task, "".join(answers))


async def asks(task: Task, model: Model, reward: Any) -> float:
    """One question in the user's own words."""
    answer = await model.chat().ask(f"What is {task.data['question']}")
    return await reward(task, answer)


class Echo:
    """Shows what was said for three steps; short actions are better."""

    def reset(self, task: Task) -> str:
        self.left = 3
        return str(task.data["question"])

    def step(self, action: str) -> Step:
        self.left -= 1
        return Step(
            observation=f"you said {action[:4]!r}", reward=float(zlib.crc32(action.encode()) % 2), is_done=not self.left
        )
