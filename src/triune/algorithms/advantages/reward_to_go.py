"""What is still to come, without a critic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from triune.registry import brick

if TYPE_CHECKING:
    from torch import Tensor

    from triune.algorithms.divider import AllSum
    from triune.algorithms.micro_batch import MicroBatch


@brick("advantage")
@dataclass(frozen=True, kw_only=True)
class RewardToGo:
    """Credit each token with the discounted sum of rewards from it on: of its own and later tokens, and the rollout's.

    A_t = sum over k >= t of discount^(k - t) x token_rewards_k + discount^(last - t) x reward - baseline. A token is
    not blamed for what was paid before it, which changes no expectation and lowers the variance. Token rewards are,
    for example, the KL penalty (`kl: {place: reward}`). A discount below 1 is biased towards what comes soon.

    Every experience of a rollout ends with the rollout's reward; tokens without a known reward get 0.

    Source: Williams 1992; reward-to-go, Sutton et al. 2000, "Policy gradient methods".

    Attributes:
        discount: Factor per trained token.
        baseline: Subtracted from every return, in its unit; any constant leaves the expected gradient unchanged.
    """

    discount: Annotated[float, Field(ge=0, le=1)] = 1.0
    baseline: float = 0.0
    where: ClassVar[str] = "trainer"
    takes_token_rewards: ClassVar[bool] = True

    def over_batch(
        self, batches: Sequence[MicroBatch], all_sum: AllSum, num_rollouts: int
    ) -> list[Mapping[str, Tensor]]:
        """Sum from the end of each sequence."""
        from triune.algorithms.advantages._batch import returns_to_go

        found = []
        for batch in batches:
            assert batch.rewards is not None, "a batch without rewards"
            returns = returns_to_go(batch, batch.streams.get("token_rewards"), batch.rewards, self.discount)
            known = batch.action_mask & ~returns.isnan()
            found.append({"advantages": (returns - self.baseline).where(known, 0.0).float()})
        return found
