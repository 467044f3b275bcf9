"""Maximum-likelihood advantages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from triune.algorithms.advantages._statistics import centred
from triune.algorithms.credit import credit
from triune.errors import RecordError
from triune.records import Group
from triune.registry import brick


@brick("advantage", "max_rl")
@dataclass(frozen=True, kw_only=True)
class MaxRLAdvantage:
    """Credit each rollout with its reward minus the group's mean, divided by that mean.

    For rewards 0 and 1 and success rate p, the gradient of log p is the sum over k of grad pass@k / k. Averaged over
    the G rollouts of a task, r / mean follows exactly its first G terms: rare successes weigh 1 / p. Subtracting the
    mean, too, lowers the variance and costs one term: the first G - 1 remain. So a group of one is REINFORCE without
    the baseline, and nothing with it.

    Where no rollout has a reward, all get 0. Rewards other than 0 and 1 follow log of the expected reward by analogy;
    negative ones have no such reading and are refused.

    Source: MaxRL, arXiv:2602.02710, theorem 2 and algorithm 1.

    Attributes:
        subtract_mean: Whether the mean is subtracted before the division.
    """

    subtract_mean: bool = True
    where: ClassVar[str] = "pipeline"

    @property
    def least_group(self) -> int:
        """With its mean subtracted, a single rollout is left with nothing."""
        return 2 if self.subtract_mean else 1

    def __call__(self, group: Group) -> Group:
        """Divide by the mean.

        Raises:
            RecordError: A reward is negative; the group is dropped.
        """
        rewards = group.rewards.tolist()
        if min(rewards, default=0.0) < 0:
            found = f"a reward of {min(rewards):g}"
            do = "shift them (`pipeline: [{use: reward_shaping, shift: …}]`) or choose `advantage: rloo`"
            raise RecordError(str(group.id), found, "0 or more: max_rl divides by the mean", do)
        mean = math.fsum(rewards) / max(len(rewards), 1)
        values = centred(rewards) if self.subtract_mean else rewards
        return credit(group, [value / mean if value else 0.0 for value in values])
