"""User-written rewards: how they are called, and what they may return."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from triune.errors import ConfigError, RewardError, TriuneError
from triune.ports import Reward
from triune.records import Experience, Task

SINGLE = ("task", "answer", "completion", "messages", "experience")
GROUP = ("task", "answers", "completions", "messages", "experiences")
TOTAL_NAMES = ("total", "reward", "score")


class Scorer:
    """A reward function with its way of being called worked out once, from its signature.

    `reward(task, answer)` scores one rollout, `reward(task, answers)` a whole group (for rankings and comparisons);
    either may be async, and may ask for more by the name of a parameter:

    | parameter | per rollout | per group |
    |---|---|---|
    | `task` | the `Task` | the `Task` |
    | `answer`, `completion` / `answers`, `completions` | text of the last assistant message | a list of them |
    | `messages` | the conversation | a list of them |
    | `experience` / `experiences` | the last `Experience` of the rollout | a list of them |

    Attributes:
        name: For messages.
        per_group: Whether `score_group` is to be called instead of `score`.
    """

    def __init__(self, function: Callable[..., Any], name: str = "") -> None:
        self.function = function
        self.name = name or _name_of(function)
        self.per_group, self._positional, self._keywords = _read_signature(function, self.name)
        self._is_plain = self._keywords in (("task", "answer"), ("task", "completion"))

    async def score(
        self, task: Task, answer: str, *, messages: Sequence[Any] = (), experience: Experience | None = None
    ) -> Reward:
        """Score one rollout.

        Raises:
            RewardError: The function raised, or returned no finite number. The rollout is invalid then, not worth 0.
        """
        assert not self.per_group, f"{self.name} scores groups"
        if self._positional or self._is_plain:
            value = await self._call(task, (task, answer), {})
        else:
            offered = {"task": task, "answer": answer, "completion": answer, "messages": messages}
            offered["experience"] = experience
            value = await self._call(task, (), {key: offered[key] for key in self._keywords})
        return to_reward(value, self._where(task))

    __call__ = score

    async def score_group(
        self,
        task: Task,
        answers: Sequence[str],
        *,
        messages: Sequence[Sequence[Any]] = (),
        experiences: Sequence[Experience] = (),
    ) -> list[Reward]:
        """Score all rollouts of one task, in order.

        Raises:
            RewardError: The function raised, or did not return one finite number for each answer.
        """
        assert self.per_group, f"{self.name} scores single rollouts"
        offered = {"task": task, "answers": answers, "completions": answers, "messages": messages}
        offered["experiences"] = experiences
        values = await self._call(task, (), {key: offered[key] for key in self._keywords})
        where = self._where(task)
        if hasattr(values, "tolist"):
            values = values.tolist()
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(answers):
            found = f"returned {_shown(values)}"
            raise RewardError(where, found, f"a list of {len(answers)} rewards, one for each answer, in order")
        return [to_reward(value, f"{where}, answer {number}") for number, value in enumerate(values)]

    async def _call(self, task: Task, positional: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        try:
            value = self.function(*positional, **keywords)
            return await value if inspect.isawaitable(value) else value
        except TriuneError:
            raise
        except (Exception, SystemExit) as error:  # the boundary around what users write
            found = f"raised {type(error).__name__}: {error}"
            raise RewardError(self._where(task), found, "a reward", "the rollout is invalid") from error

    def _where(self, task: Task) -> str:
        return f"reward {self.name} on task {task.taskset}/{task.key}"


def as_reward(function: Callable[..., Any] | Scorer, name: str = "") -> Scorer:
    """Make a `Scorer` of a reward brick or a plain function.

    Raises:
        ConfigError: Its parameters are none that a reward can be given.
    """
    return function if isinstance(function, Scorer) else Scorer(function, name)


def to_reward(value: Any, where: str) -> Reward:
    """Convert what a reward function returned.

    Accepted: `Reward`, bool, int, float, a NumPy or tensor scalar (also of one element), and a mapping name → number
    with the total under `total`, `reward` or `score`; its other entries are parts. Totals are never summed up by
    guess: a length among the entries would drown what matters.

    Args:
        value: What was returned.
        where: Names the reward and the task.

    Raises:
        RewardError: None, text, NaN, infinity, several elements, or anything else.
    """
    if type(value) is float and math.isfinite(value):
        return Reward(total=value)
    if isinstance(value, Reward):
        if not value.is_valid:
            return value
        parts = {name: _number(part, f"{where}, part {name}") for name, part in value.parts.items()}
        metrics = {name: _number(number, f"{where}, metric {name}") for name, number in value.metrics.items()}
        return Reward(total=_number(value.total, where), parts=parts, metrics=metrics)
    if not isinstance(value, Mapping):
        return Reward(total=_number(value, where))
    totals = [name for name in TOTAL_NAMES if name in value]
    if len(totals) != 1:
        raise RewardError(
            where, f"returned {_shown(value)}", f"the total under one of {', '.join(TOTAL_NAMES)}, parts beside it"
        )
    parts = {str(name): _number(part, f"{where}, part {name}") for name, part in value.items()}
    return Reward(total=parts.pop(totals[0]), parts=parts)


def _number(value: Any, where: str) -> float:
    if type(value) is not float:
        if value is None:
            raise RewardError(where, "returned None", "a number", "does every branch of the function return?")
        if hasattr(value, "item") and _num_elements(value) == 1:
            value = value.item()
        if not isinstance(value, bool | int | float):
            raise RewardError(where, f"returned {_shown(value)}", "a number, a mapping name → number, or a Reward")
        value = float(value)
    if not math.isfinite(value):
        raise RewardError(where, f"returned {value}", "a finite number")
    return value


def _num_elements(value: Any) -> int:
    return value.numel() if hasattr(value, "numel") else getattr(value, "size", 0)


def _shown(value: Any) -> str:
    text = f"{value!r} ({type(value).__name__})"
    return text if len(text) <= 120 else text[:117] + "..."


def _name_of(function: Any) -> str:
    marked = getattr(function, "__brick__", None)
    return marked[1] if marked else getattr(function, "__name__", type(function).__name__)


def _read_signature(function: Any, name: str) -> tuple[bool, bool, tuple[str, ...]]:
    """Whether it scores groups, whether it takes (task, answer) by position, and the names it asks for."""
    if not callable(function):
        raise ConfigError(f"reward {name}", f"found {_shown(function)}", "a function reward(task, answer)")
    parameters = inspect.signature(function).parameters.values()
    by_name = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY)]
    names = [p.name for p in by_name if p.name in SINGLE or p.name in GROUP]
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    unknown = [p.name for p in needed if p.name not in names]
    per_group = any(key in names for key in ("answers", "completions", "experiences"))
    allowed = GROUP if per_group else SINGLE
    mixed = [key for key in names if key not in allowed]
    if not unknown and not mixed and any(key != "task" for key in names):
        return per_group, False, tuple(names)
    if len(needed) == 2 and len(unknown) == 2 and all(p.kind is not p.KEYWORD_ONLY for p in needed):
        return False, True, ()
    found = f"parameters {', '.join(p.name for p in parameters) or 'none'}"
    expected = f"names out of {', '.join(SINGLE)} (one rollout) or {', '.join(GROUP)} (a group)"
    raise ConfigError(f"reward {name}", found, expected, "e.g. def reward(task, answer) -> float")
