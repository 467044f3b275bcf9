"""Several rewards, added with weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from triune import registry
from triune.errors import ConfigError
from triune.ports import Reward
from triune.records import Task
from triune.registry import brick
from triune.tasks.scoring import Scorer, as_reward


@brick("reward")
@dataclass(frozen=True, kw_only=True)
class Weighted:
    """The weighted sum of named parts; each part's raw value is kept beside the total.

    Raw values are what tells whether a shaped reward still rewards being right: `parts` holds them unweighted, and the
    metric `weighted/<name>` holds each part's share of the total. A part without verdict makes the whole invalid.

    In a run file:

        reward:
          use: weighted
          parts:
            correct: {use: math_verify, weight: 1.0}
            form: {use: format, pattern: '<answer>.*</answer>', match: anywhere, weight: 0.2}

    Attributes:
        parts: Name → a reward, with its `weight` (default 1) beside its fields.
    """

    parts: dict[str, Any]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ConfigError("weighted.parts", "no parts", "NAME: {use: reward, weight: 1.0}")
        assert self.scorers, "built now, so that a wrong part is an error when the config is read"

    @cached_property
    def scorers(self) -> tuple[tuple[str, float, Scorer], ...]:
        """Name, weight and scorer of each part."""
        return tuple(_build_part(name, spec) for name, spec in self.parts.items())

    async def __call__(self, task: Task, answer: str, *, messages: Any = (), experience: Any = None) -> Reward:
        """Score one answer with every part; raises what a part raises."""
        shares, parts, metrics, is_valid = [], {}, {}, True
        for name, weight, scorer in self.scorers:
            reward = await scorer.score(task, answer, messages=messages, experience=experience)
            shares.append(weight * reward.total)
            parts[name] = reward.total
            parts |= {f"{name}.{inner}": value for inner, value in reward.parts.items()}
            metrics[f"weighted/{name}"] = weight * reward.total
            metrics |= {f"{name}/{inner}": value for inner, value in reward.metrics.items()}
            is_valid = is_valid and reward.is_valid
        return Reward(total=math.fsum(shares), parts=parts, metrics=metrics, is_valid=is_valid)


def _build_part(name: str, spec: Any) -> tuple[str, float, Scorer]:
    where, weight = f"weighted.parts.{name}", 1.0
    if isinstance(spec, Mapping):
        spec = dict(spec)
        weight = spec.pop("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ConfigError(f"{where}.weight", f"found {weight!r}", "a number")
    part = registry.build("reward", spec, where) if isinstance(spec, str | Mapping) else spec
    scorer = as_reward(part, name)
    if scorer.per_group:
        raise ConfigError(where, f"{name} scores whole groups", "a reward of single answers")
    return name, float(weight), scorer
