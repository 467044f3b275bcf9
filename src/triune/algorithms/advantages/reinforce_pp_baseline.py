"""Group mean first, then whitening over the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from triune.algorithms.advantages._statistics import centred
from triune.algorithms.credit import credit
from triune.records import Group
from triune.registry import brick

if TYPE_CHECKING:
    from torch import Tensor

    from triune.algorithms.divider import AllSum
    from triune.algorithms.micro_batch import MicroBatch


@brick("advantage", "reinforce_pp_baseline")
@dataclass(frozen=True, kw_only=True)
class ReinforcePPBaselineAdvantage:
    """Credit each rollout with its reward minus the group's mean, whitened over the whole batch.

    Unlike GRPO one deviation divides all groups, so easy and hard tasks keep their natural weight; unlike
    `grpo: {scale: batch}` it is that of the centred rewards, and the batch's mean is subtracted once more. That mean is
    0 over rollouts; over tokens it is not where long answers are worse or better, and then a flat group does not stay
    at 0: it is moved with all the others. The paper holds the policy near the reference by a k2 term in the loss.

    Source: REINFORCE++ with baseline, arXiv:2501.03262.

    Attributes:
        statistics: What weighs alike in mean and deviation: tokens, as the paper has it, or rollouts.
        epsilon: Added to the deviation, in the unit of the reward.
    """

    statistics: Literal["tokens", "rollouts"] = "tokens"
    epsilon: float = 1e-6
    where: ClassVar[str] = "trainer"
    least_group: ClassVar[int] = 2

    def __call__(self, group: Group) -> Group:
        """Subtract the group's mean."""
        return credit(group, centred(group.rewards.tolist()))

    def over_batch(
        self, batches: Sequence[MicroBatch], all_sum: AllSum, num_rollouts: int
    ) -> list[Mapping[str, Tensor]]:
        """Whiten over the step."""
        from triune.algorithms.advantages._batch import whitened

        values = [batch.advantages for batch in batches]
        found = whitened(
            batches, values, over=self.statistics, epsilon=self.epsilon, all_sum=all_sum, num_rollouts=num_rollouts
        )
        return [{"advantages": value} for value in found]
