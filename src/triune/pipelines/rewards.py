"""Change a reward without hiding what the task said."""

from __future__ import annotations

import math
from collections.abc import Mapping

from triune.errors import RewardError
from triune.records import Experience, Group

RAW_REWARD = "raw_reward"
"""Key in `Experience.metrics` under which the first operator that changes a reward keeps the one before."""


def with_reward(experience: Experience, reward: float, *, parts: Mapping[str, float] | None = None) -> Experience:
    """Copy with another reward; the reward the task gave stays visible as metric `raw_reward`.

    Args:
        experience: Its reward is known.
        reward: What the algorithm shall see from now on.
        parts: Raw, unweighted parts to add to `reward_parts`.

    Raises:
        RewardError: The new reward is not finite.
    """
    if not math.isfinite(reward):
        raise RewardError(str(experience.id), f"the shaped reward is {reward}", "a finite number")
    metrics = experience.metrics
    if RAW_REWARD not in metrics:
        assert experience.reward is not None, "a reward that is not known yet cannot be shaped"
        metrics = {**metrics, RAW_REWARD: experience.reward}
    known = {**experience.reward_parts, **parts} if parts else experience.reward_parts
    return experience.replace(reward=reward, metrics=metrics, reward_parts=known)


def raw_rewards(group: Group, part: str = "") -> dict[int, float]:
    """By rollout number: what the task said before any shaping, or one part of it; valid rollouts only.

    Raises:
        RewardError: A rollout has no such part.
    """
    found: dict[int, float] = {}
    for member, rows in group.valid_members.items():
        first = rows[0]
        if not part:
            reward = first.metrics.get(RAW_REWARD, first.reward)
            assert reward is not None, "valid members have a reward"
            found[member] = reward
        elif part in first.reward_parts:
            found[member] = first.reward_parts[part]
        else:
            have = ", ".join(first.reward_parts) or "none"
            raise RewardError(str(first.id), f"no reward part {part!r}", f"one of its parts ({have})")
    return found
