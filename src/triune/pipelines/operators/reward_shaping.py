"""Weigh, scale, shift and clip rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from triune.errors import ConfigError, RewardError
from triune.pipelines.rewards import with_reward
from triune.records import Experience
from triune.registry import brick


@brick("operator")
@dataclass(frozen=True, kw_only=True)
class RewardShaping:
    """Make the reward the algorithm sees from the reward and its parts: clip(scale x sum(weight x part) + shift).

    Nothing is lost: parts stay raw and unweighted, and the task's own reward stays visible as metric `raw_reward`, so a
    shaped reward that rises while the task's falls can be seen. Scaling or shifting all rewards changes nothing under
    GRPO's advantage; it matters for a fixed baseline and next to penalties in absolute units.

    Attributes:
        weights: Weight per reward part; parts not named get 0. Empty = start from the reward as it is.
        scale: Factor.
        shift: Added after scaling.
        clip_low: Smallest reward; null = no bound.
        clip_high: Largest reward; null = no bound.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    scale: float = 1.0
    shift: float = 0.0
    clip_low: float | None = None
    clip_high: float | None = None

    def __call__(self, experience: Experience) -> Experience:
        """Return the experience with its shaped reward; one without a known reward stays as it is.

        Raises:
            RewardError: A part that has a weight is missing; the experience becomes invalid.
        """
        if experience.reward is None or not experience.is_valid:
            return experience
        reward = self.scale * self.combined(experience) + self.shift
        if self.clip_low is not None:
            reward = max(reward, self.clip_low)
        if self.clip_high is not None:
            reward = min(reward, self.clip_high)
        return experience if reward == experience.reward else with_reward(experience, reward)

    def combined(self, experience: Experience) -> float:
        """The weighted sum of parts, or the reward when no weights are given."""
        parts = experience.reward_parts
        for name in self.weights:
            if name not in parts:
                have = ", ".join(parts) or "none"
                raise RewardError(str(experience.id), f"no reward part {name!r}", f"one of its parts ({have})")
        if not self.weights:
            assert experience.reward is not None, "checked by the caller"
            return experience.reward
        return sum(weight * parts[name] for name, weight in self.weights.items())

    def check(self, where: str) -> None:
        """Raise ConfigError when the bounds cross."""
        if self.clip_low is not None and self.clip_high is not None and self.clip_low > self.clip_high:
            found = f"found {self.clip_low} above clip_high {self.clip_high}"
            raise ConfigError(f"{where}.clip_low", found, "at most clip_high", "exchange them")
