"""The answer is mathematically equal to the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from triune.errors import RewardError
from triune.ports import Reward
from triune.records import Task
from triune.registry import brick
from triune.tasks.fields import truth_of
from triune.tasks.verifiers import VerifierFailed, shared_verifiers


@brick("reward")
@dataclass(frozen=True, kw_only=True)
class MathVerify:
    r"""1 when the answer's final expression equals the reference (`\frac{1}{2}` = 0.5 = 50\%), else 0.

    The package math-verify reads LaTeX and plain expressions. It runs in worker processes that are killed when an
    expression takes longer than the bound: signals do not work in threads, and one tower of powers can hang for ever.
    An answer without mathematics is worth 0; a verifier without verdict makes the rollout invalid, which is not 0.

    Attributes:
        key: Field of the task's data with the reference.
        timeout_s: Wall-clock bound of one verification.
        workers: Processes that verify at the same time; shared by all rewards with the same number.
    """

    key: str = "answer"
    timeout_s: Annotated[float, Field(gt=0)] = 5.0
    workers: Annotated[int, Field(ge=1)] = 2

    async def __call__(self, task: Task, answer: str) -> Reward:
        """Score one answer; raises RewardError when the verifier gives no verdict."""
        truth = truth_of(task, self.key, "math_verify")
        if answer.strip() == truth.strip():
            return Reward(total=1.0)
        request = {"verifier": "math", "truth": truth, "answer": answer}
        try:
            reply = await shared_verifiers(self.workers).verify(request, self.timeout_s)
        except VerifierFailed as error:
            where = f"math_verify on task {task.taskset}/{task.key}"
            raise RewardError(
                where, str(error), "a verdict", "the rollout is invalid and leaves the statistics"
            ) from error
        return Reward(total=reply["score"], metrics=reply["metrics"])
