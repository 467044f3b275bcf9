"""The answer has the asked-for form."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from triune.errors import ConfigError, RewardError
from triune.records import Task
from triune.registry import brick
from triune.tasks.verifiers import VerifierFailed, shared_verifiers


@brick("reward")
@dataclass(frozen=True, kw_only=True)
class Format:
    r"""1 when a regular expression matches the answer, else 0. Says nothing about whether the answer is right.

    It matches in worker processes that are killed at the bound: some patterns need a time that doubles with every
    character of an answer that does not match (`(.|\n)*` here, where `.` matches line breaks already). An answer
    without verdict makes the rollout invalid, which is not 0.

    Attributes:
        pattern: Python regular expression; `.` matches line breaks too. A pattern for reasoning in tags:
            `\s*<think>.+</think>\s*<answer>.+</answer>\s*`.
        match: `whole`: the pattern covers the whole answer; `anywhere`: it occurs in it.
        timeout_s: Wall-clock bound of one match.
        workers: Processes that match at the same time; shared by all rewards with the same number.
    """

    pattern: str
    match: Literal["whole", "anywhere"] = "whole"
    timeout_s: Annotated[float, Field(gt=0)] = 5.0
    workers: Annotated[int, Field(ge=1)] = 2

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError("format.pattern", f"{self.pattern!r} ({error})", "a regular expression") from None

    async def __call__(self, task: Task, answer: str) -> float:
        """Score one answer; raises RewardError when the match does not end in time."""
        request = {"verifier": "format", "pattern": self.pattern, "match": self.match, "answer": answer}
        try:
            reply = await shared_verifiers(self.workers).verify(request, self.timeout_s)
        except VerifierFailed as error:
            where, do = (
                f"format on task {task.taskset}/{task.key}",
                "write a pattern in which no two repetitions overlap",
            )
            raise RewardError(where, f"{self.pattern!r}: {error}", "a verdict", do) from error
        return reply["score"]
