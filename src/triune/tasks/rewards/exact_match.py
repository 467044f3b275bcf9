"""The answer is the reference, letter by letter."""

from __future__ import annotations

from dataclasses import dataclass

from triune.records import Task
from triune.registry import brick
from triune.tasks.fields import truth_of


@brick("reward")
@dataclass(frozen=True, kw_only=True)
class ExactMatch:
    """1 when the whole answer equals the reference, else 0; white space around either does not count.

    Stricter than `last_number`, which forgives everything around the number.

    Attributes:
        key: Field of the task's data with the reference.
        ignore_case: Compare without regard to case.
    """

    key: str = "answer"
    ignore_case: bool = False

    def __call__(self, task: Task, answer: str) -> float:
        """Score one answer; raises RewardError when the task has no reference."""
        given, truth = answer.strip(), truth_of(task, self.key, "exact_match").strip()
        if self.ignore_case:
            given, truth = given.casefold(), truth.casefold()
        return 1.0 if given == truth else 0.0
