"""The answer has the asked-for form."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from triune.errors import ConfigError
from triune.records import Task
from triune.registry import brick


@brick("reward")
@dataclass(frozen=True, kw_only=True)
class Format:
    r"""1 when a regular expression matches the answer, else 0. Says nothing about whether the answer is right.

    Attributes:
        pattern: Python regular expression; `.` matches line breaks too. A pattern for reasoning in tags:
            `\s*<think>.+</think>\s*<answer>.+</answer>\s*`.
        match: `whole`: the pattern covers the whole answer; `anywhere`: it occurs in it.
    """

    pattern: str
    match: Literal["whole", "anywhere"] = "whole"

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError("format.pattern", f"{self.pattern!r} ({error})", "a regular expression") from None

    @cached_property
    def compiled(self) -> re.Pattern[str]:
        """The pattern, ready to match."""
        return re.compile(self.pattern, re.DOTALL)

    def __call__(self, task: Task, answer: str) -> float:
        """Score one answer."""
        found = self.compiled.fullmatch(answer) if self.match == "whole" else self.compiled.search(answer)
        return 1.0 if found else 0.0
