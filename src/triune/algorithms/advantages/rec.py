"""Group-relative REINFORCE."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from triune.algorithms.advantages._statistics import centred
from triune.algorithms.credit import credit
from triune.records import Group
from triune.registry import brick


@brick("advantage", "rec")
@dataclass(frozen=True, kw_only=True)
class RECAdvantage:
    """Credit each rollout with its reward minus the group's mean, without a deviation.

    Derived without assuming who sampled the group: pairs of answers, not answers, are compared, so it holds off-policy
    and losses of the REC family need no importance weights. A flat group gets exactly 0.

    `drop: balance` shapes the data: where more rollouts lie below the mean than at or above it, as many of those below
    as there are too many are left out, and the mean is that of the rest. Which ones is drawn by the group's id, so a
    replay draws the same. Their tokens keep advantage 0.

    Source: arXiv:2509.24203, REINFORCE with the group's mean, and RED-Drop for `drop`.

    Attributes:
        drop: What to leave out: nothing, or the surplus of rollouts below the mean.
    """

    drop: Literal["none", "balance"] = "none"
    where: ClassVar[str] = "pipeline"
    least_group: ClassVar[int] = 2

    def __call__(self, group: Group) -> Group:
        """Subtract the mean of what is kept."""
        rewards = dict(zip(group.valid_members, group.rewards.tolist(), strict=True))
        kept = sorted(rewards.keys() - self.dropped(group, rewards))
        found = dict(zip(kept, centred([rewards[member] for member in kept]), strict=True))
        return credit(group, [found.get(member, 0.0) for member in rewards])

    def dropped(self, group: Group, rewards: dict[int, float]) -> set[int]:
        """Numbers of the rollouts that are left out."""
        low = sorted(
            member for member, value in zip(rewards, centred(list(rewards.values())), strict=True) if value < 0
        )
        surplus = 2 * len(low) - len(rewards)
        if self.drop == "none" or surplus <= 0:
            return set()
        chance = np.random.default_rng(zlib.crc32(str(group.id).encode()))
        return set(chance.permutation(low)[:surplus].tolist())
