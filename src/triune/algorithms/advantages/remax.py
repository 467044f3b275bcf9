"""The greedy answer's reward as baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from triune.algorithms.credit import credit
from triune.errors import RecordError
from triune.records import Experience, Group
from triune.registry import brick


@brick("advantage", "remax")
@dataclass(frozen=True, kw_only=True)
class ReMaxAdvantage:
    """Credit each rollout with its reward minus what the policy's greedy answer to the same task earned.

    The greedy answer does not depend on what was sampled, so the expected gradient is exactly the policy gradient, and
    a group of one sampled rollout suffices. The explorer adds a greedy member to every group (temperature 0), which is
    left out of the batch: greedy tokens have no log-prob to train. In groups from elsewhere the baseline may stand in a
    metric of the rollouts; where there is neither, the group is refused: any other number would be another method.

    Source: ReMax, arXiv:2310.10505.

    Attributes:
        metric: Name of the metric that holds the greedy answer's reward, for groups without a greedy member.
    """

    metric: str = "greedy_reward"
    where: ClassVar[str] = "pipeline"
    greedy_member: ClassVar[bool] = True
    zero_on_flat: ClassVar[bool] = False

    def __call__(self, group: Group) -> Group:
        """Subtract the greedy reward.

        Raises:
            RecordError: Neither a greedy member nor the metric is there, or the greedy member failed.
        """
        sampled = group.with_records([row for row in group.experiences if not _is_greedy(row)])
        if len(sampled) == len(group):
            noted = [self._noted(rows[0]) for rows in group.valid_members.values()]
            return credit(group, (group.rewards - noted).tolist())
        greedy = group.with_records([row for row in group.experiences if _is_greedy(row)]).rewards
        if not len(greedy):
            raise RecordError(str(group.id), "the greedy member failed or has no reward", "one that is valid")
        return credit(sampled, (sampled.rewards - greedy.mean()).tolist())

    def _noted(self, row: Experience) -> float:
        if self.metric not in row.metrics:
            do = f"give it in the reward (`Reward(metrics={{{self.metric!r}: …}})`), or choose `advantage: rloo`"
            raise RecordError(str(row.id), "no greedy baseline", f"a greedy member or metric {self.metric!r}", do)
        return row.metrics[self.metric]


def _is_greedy(row: Experience) -> bool:
    return not np.any(row.temperature)
