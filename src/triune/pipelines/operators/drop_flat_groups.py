"""Drop groups that teach nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from triune.pipelines.rewards import raw_rewards
from triune.records import Group
from triune.registry import brick


@brick("operator")
@dataclass(frozen=True, kw_only=True)
class DropFlatGroups:
    """Drop a group whose rollouts all got the same reward: a group-relative advantage would be 0 everywhere.

    Looks at the reward the task gave, before any shaping: a length penalty gives spread to a group in which every
    answer is wrong, and that spread is no reason to train on it. The dropped group's slot is refunded, so the explorer
    makes another one (DAPO's dynamic sampling).

    Source: DAPO, arXiv:2503.14476, section 3.2.

    Attributes:
        part: Name of the reward part to compare; empty = the task's whole reward.
        tolerance: Spread up to which a group is flat, in the unit of the reward.
    """

    part: str = ""
    tolerance: Annotated[float, Field(ge=0)] = 1e-9
    drops_flat_groups: ClassVar[bool] = True

    def __call__(self, group: Group) -> Group | None:
        """Return the group, or None when it is flat or has no valid rollout."""
        rewards = raw_rewards(group, self.part).values()
        if not rewards or max(rewards) - min(rewards) <= self.tolerance:
            return None
        return group
