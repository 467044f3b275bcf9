"""Group-relative advantages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from triune.algorithms.credit import credit
from triune.records import Group
from triune.registry import brick

if TYPE_CHECKING:
    from torch import Tensor

    from triune.algorithms.divider import AllSum
    from triune.algorithms.micro_batch import MicroBatch


@brick("advantage", "grpo")
@dataclass(frozen=True, kw_only=True)
class GRPOAdvantage:
    """Credit each rollout with its reward minus the group's mean, over a standard deviation.

    The mean removes what all rollouts of a task share. Dividing by the group's own deviation gives every task the same
    weight, so tasks that are nearly always or nearly never solved push as hard as the others; `scale: batch` divides
    all groups of a step by one deviation, `scale: none` is Dr. GRPO's answer. A flat group gets exactly 0.

    The paper's formula says "std"; both readings are in use: `sample` (TRL, verl, the paper's authors' torch code) and
    `population`. For a group of 8 they differ by 7 %.

    Source: GRPO, arXiv:2402.03300, section 4.1.2.

    Attributes:
        scale: What to divide by: the deviation of the group, of the batch, or nothing.
        std: `sample` divides the squares by G - 1, `population` by G.
        epsilon: Added to the deviation, in the unit of the reward.
    """

    scale: Literal["group", "batch", "none"] = "group"
    std: Literal["sample", "population"] = "sample"
    epsilon: float = 1e-6
    least_group: ClassVar[int] = 2

    @property
    def where(self) -> str:
        """`trainer` when the deviation is the whole batch's, which no single group knows."""
        return "trainer" if self.scale == "batch" else "pipeline"

    def __call__(self, group: Group) -> Group:
        """Subtract the mean, and divide by the group's deviation when `scale` says so."""
        rewards = group.rewards.tolist()
        if not rewards:
            return credit(group, ())
        mean = math.fsum(rewards) / len(rewards)
        centred = [reward - mean for reward in rewards]
        if max(rewards) == min(rewards):
            centred = [0.0] * len(rewards)
        elif self.scale == "group":
            deviation = self.deviation(centred)
            centred = [value / (deviation + self.epsilon) for value in centred]
        return credit(group, centred)

    def deviation(self, centred: Sequence[float]) -> float:
        """Standard deviation of values whose mean is 0."""
        squares = math.fsum(value * value for value in centred)
        return math.sqrt(squares / max(len(centred) - (self.std == "sample"), 1))

    def over_batch(
        self, batches: Sequence[MicroBatch], all_sum: AllSum, num_rollouts: int
    ) -> list[Mapping[str, Tensor]]:
        """Divide the centred advantages of a step by the deviation of its rewards, each rollout counted once.

        Returns:
            The new stream `advantages` [B, T] of every micro-batch.
        """
        from triune.algorithms.rollouts import rollout_values

        rewards, present = rollout_values(batches, [batch.rewards for batch in batches], all_sum, num_rollouts)
        rewards = rewards[present]
        count = len(rewards) - (self.std == "sample")
        if count < 1 or bool((rewards == rewards[0]).all()):
            return [{"advantages": batch.advantages * 0.0} for batch in batches]
        deviation = float(((rewards - rewards.mean()).square().sum() / count).sqrt())
        return [{"advantages": batch.advantages / (deviation + self.epsilon)} for batch in batches]
