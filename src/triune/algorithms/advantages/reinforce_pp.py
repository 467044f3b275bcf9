"""Returns of tokens, whitened over the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from triune.registry import brick

if TYPE_CHECKING:
    from torch import Tensor

    from triune.algorithms.divider import AllSum
    from triune.algorithms.micro_batch import MicroBatch


@brick("advantage", "reinforce_pp")
@dataclass(frozen=True, kw_only=True)
class ReinforcePPAdvantage:
    """Credit each token with the rollout's reward plus later token rewards, whitened over the whole batch.

    A_t = reward + sum over k >= t of token_rewards_k (the KL penalty, with `kl: {place: reward}`), then (A - mean) /
    std over all ranks. Needs no group: the batch's mean is the baseline, and its deviation, unlike a group's, hardly
    depends on the single rollout. The bias of whitening with one's own batch vanishes as the batch grows.

    Whose mean: the paper's formula runs over all tokens, so long answers decide it; `statistics: rollouts` counts every
    rollout once. A step in which all values are equal gets exactly 0; tokens without a known reward get 0.

    Source: REINFORCE++, arXiv:2501.03262, eq. 8 to 10 of v8.

    Attributes:
        discount: Factor per trained token.
        statistics: What weighs alike in mean and deviation.
        epsilon: Added to the deviation, in the unit of the reward.
    """

    discount: Annotated[float, Field(ge=0, le=1)] = 1.0
    statistics: Literal["tokens", "rollouts"] = "tokens"
    epsilon: float = 1e-6
    where: ClassVar[str] = "trainer"
    takes_token_rewards: ClassVar[bool] = True

    def over_batch(
        self, batches: Sequence[MicroBatch], all_sum: AllSum, num_rollouts: int
    ) -> list[Mapping[str, Tensor]]:
        """Sum from the end of each sequence, then whiten."""
        from triune.algorithms.advantages._batch import returns_to_go, whitened

        values = [
            returns_to_go(batch, batch.streams.get("token_rewards"), batch.rewards, self.discount) for batch in batches
        ]
        found = whitened(
            batches, values, over=self.statistics, epsilon=self.epsilon, all_sum=all_sum, num_rollouts=num_rollouts
        )
        return [{"advantages": value} for value in found]
