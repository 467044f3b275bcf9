"""What a priority is told of an entry, and how its answers become an order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from triune.errors import ConfigError, PluginError

WINDOWS = ("priority", "age", "newest", "reward", "advantage")
"""Orders that an index keeps; the first entries of some of them are what a priority chooses from."""

DEFAULT_WINDOWS = ("priority", "newest")
"""Of a priority that does not say which: both ends of what waits."""


class Candidate(NamedTuple):
    """An entry that could be leased now, as a priority sees it.

    Attributes:
        entry: Its id, `run/taskset/task_key/visit`.
        priority: The stored one: mean of `Experience.priority`, as operators and amendments left it.
        reward: Mean over rollouts whose reward is known and valid; None when there is none.
        advantage: Mean absolute advantage over action tokens; None when it has no advantages.
        staleness: Published steps on the surviving line since its oldest version; 0 when this run did not sample it.
        uses: How often this run has leased it before, those it gave back not counted.
        task_uses: How often this run has leased entries of the same task, this one included.
        source: Of its first record: `policy`, `expert`, `imported`, …
        num_records: Experiences, pairs or texts in it.
        waited_s: Seconds since it was put.
        step: The step that would train on it, from 1; 0 when the sampling does not say.
    """

    entry: str
    priority: float
    reward: float | None
    advantage: float | None
    staleness: int
    uses: int
    task_uses: int
    source: str
    num_records: int
    waited_s: float
    step: int


Priority = Callable[[Candidate], float]
"""A brick of kind `priority`, or any function: the entry with the highest number is trained on first."""


def windows_of(priority: Priority, where: str) -> tuple[str, ...]:
    """The orders whose first entries a priority chooses from: what it names in `windows`, else the default.

    Raises:
        ConfigError: It is no function, or names an order that there is not.
    """
    if not callable(priority):
        raise ConfigError(
            where, f"found {priority!r}", "a priority, or `module:function`", "list them with `triune ls priority`"
        )
    windows = getattr(priority, "windows", DEFAULT_WINDOWS)
    unknown = [window for window in windows if window not in WINDOWS]
    if unknown or not windows:
        raise ConfigError(
            f"{where}.windows", f"found {', '.join(unknown) or 'none'}", f"some of {', '.join(WINDOWS)}", "name one"
        )
    return tuple(windows)


def score_of(priority: Priority, candidate: Candidate) -> float:
    """What a priority says of one entry. The boundary around what users write.

    Raises:
        PluginError: It raised, or answered something that has no place in an order.
    """
    try:
        answer: Any = priority(candidate)
        score = float(answer)
    except Exception as error:
        raise _refusal(priority, candidate, f"{type(error).__name__}: {error}") from error
    if math.isnan(score):
        raise _refusal(priority, candidate, "nan")
    return score


def _refusal(priority: Priority, candidate: Candidate, found: str) -> PluginError:
    name = getattr(priority, "__qualname__", type(priority).__qualname__)
    return PluginError(
        "buffer.priority", f"{name} of entry {candidate.entry!r}: {found}", "a number",
        "mend it and resume: nothing was leased",
    )  # fmt: skip
