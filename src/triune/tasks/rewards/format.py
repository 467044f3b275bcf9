"""The answer has the asked-for form."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

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
    _compiled: Any = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "_compiled", re.compile(self.pattern, re.DOTALL))
        except re.error as error:
            raise ConfigError("format.pattern", f"{self.pattern!r} ({error})", "a regular expression") from None

    def __call__(self, task: Task, answer: str) -> float:
        """Score one answer."""
        found = self._compiled.fullmatch(answer) if self.match == "whole" else self._compiled.search(answer)
        return 1.0 if found else 0.0
