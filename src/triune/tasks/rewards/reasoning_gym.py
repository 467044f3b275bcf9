"""The generator's own scorer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
from pydantic import Field

from triune.errors import RewardError
from triune.ports import Reward
from triune.records import Task
from triune.registry import brick
from triune.tasks.generators import Recipe, has_plain_scorer, score
from triune.tasks.verifiers import VerifierFailed, shared_verifiers


@brick("reward", "reasoning_gym")
@dataclass(frozen=True, kw_only=True)
class ReasoningGymScore:
    """The score in [0, 1] that a row's generator gives an answer; some give partial credit.

    Generators that only compare text score in place. The others run in worker processes with a wall-clock bound:
    some raise on free text, a few evaluate expressions.

    Attributes:
        timeout_s: Wall-clock bound of one scoring.
        workers: Processes that score at the same time; shared by all rewards with the same number.
    """

    timeout_s: Annotated[float, Field(gt=0)] = 5.0
    workers: Annotated[int, Field(ge=1)] = 2

    async def __call__(self, task: Task, answer: str) -> Reward:
        """Score one answer; raises RewardError when the scorer gives none."""
        where = f"reasoning_gym on task {task.taskset}/{task.key}"
        recipe = task.data.get("recipe")
        if recipe is None:
            raise RewardError(where, "the row has no 'recipe'", "a row of `use: reasoning_gym`", "name another reward")
        known = msgspec.convert(recipe, Recipe)
        if has_plain_scorer(known):
            return Reward(total=score(known, recipe["row"], answer)[0])
        request = {"verifier": "reasoning_gym", "recipe": recipe, "answer": answer}
        try:
            reply = await shared_verifiers(self.workers).verify(request, self.timeout_s)
        except VerifierFailed as error:
            raise RewardError(
                where, str(error), "a score", "the rollout is invalid and leaves the statistics"
            ) from error
        return Reward(total=reply["score"], metrics=reply["metrics"])
