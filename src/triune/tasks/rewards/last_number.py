"""The last number of the answer is that of the reference."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from triune.errors import RewardError
from triune.records import Task
from triune.registry import brick
from triune.tasks.fields import truth_of

NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|(?<=\w)\d+(?:\.\d+)?|-?\.\d+")


@brick("reward")
@dataclass(frozen=True, kw_only=True)
class LastNumber:
    """1 when the last number in the answer equals the last number in the reference, else 0.

    For answers in free text, as of models that explain themselves: `… so she pays $1,250.` counts as 1250, and a
    reference may be a whole solution that ends in `#### 1250`. A minus sign belongs to the number unless a digit or
    letter stands right before it.

    Attributes:
        key: Field of the task's data with the reference.
        tolerance: Largest difference that still counts as equal.
    """

    key: str = "answer"
    tolerance: Annotated[float, Field(ge=0)] = 0.0

    def __call__(self, task: Task, answer: str) -> float:
        """Score one answer; raises RewardError when the reference holds no number."""
        truth_text = truth_of(task, self.key, "last_number")
        truth = last_number(truth_text)
        if truth is None:
            where = f"last_number on task {task.taskset}/{task.key}"
            raise RewardError(where, f"field {self.key!r} is {truth_text!r}", "a reference with a number in it")
        given = last_number(answer)
        return 1.0 if given is not None and abs(given - truth) <= self.tolerance else 0.0


def last_number(text: str) -> float | None:
    """The last decimal number in a text, thousands separated by commas or not; None when there is none."""
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None
