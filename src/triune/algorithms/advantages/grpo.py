"""Group-relative advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from triune.algorithms.advantages._statistics import centred, centred_ranks, standardised
from triune.algorithms.credit import credit
from triune.errors import ConfigError
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

    Where attempts fail, a group is smaller than it was meant to be, and its task weighs less in the step. Copies of its
    members would restore the weight and, being copies, nothing else: `fill_to` multiplies by the number of copies
    instead, which trains every token once and keeps mean and deviation those of the members that are there. Flat groups
    need no stand-ins at all: drop them (`drop_flat_groups`) and the explorer makes others.

    Source: GRPO, arXiv:2402.03300, section 4.1.2.

    Attributes:
        scale: What to divide by: the deviation of the group, of the batch, or nothing.
        std: `sample` divides the squares by G - 1, `population` by G.
        epsilon: Added to the deviation, in the unit of the reward.
        rank: Whether rewards are replaced by their centred ranks in the group, from -0.5 to 0.5, equal rewards sharing
            the mean of theirs: only the order counts, outliers and the unit of the reward do not.
        fill_to: Size of a full group: a smaller one with G valid rollouts is multiplied by `fill_to` / G; null = groups
            weigh by their members.
    """

    scale: Literal["group", "batch", "none"] = "group"
    std: Literal["sample", "population"] = "sample"
    epsilon: float = 1e-6
    rank: bool = False
    fill_to: Annotated[int, Field(ge=2)] | None = None
    least_group: ClassVar[int] = 2

    @property
    def where(self) -> str:
        """`trainer` when the deviation is the whole batch's, which no single group knows."""
        return "trainer" if self.scale == "batch" else "pipeline"

    def __call__(self, group: Group) -> Group:
        """Subtract the mean, and divide by the group's deviation when `scale` says so."""
        return credit(group, self.relative(group.rewards.tolist()))

    def relative(self, rewards: Sequence[float]) -> list[float]:
        """Advantage of each rollout among the others."""
        values = centred_ranks(rewards) if self.rank else rewards
        found = standardised(values, self.std, self.epsilon) if self.scale == "group" else centred(values)
        factor = 1.0 if self.fill_to is None else max(self.fill_to / max(len(rewards), 1), 1.0)
        return [value * factor for value in found]

    def over_batch(
        self, batches: Sequence[MicroBatch], all_sum: AllSum, num_rollouts: int
    ) -> list[Mapping[str, Tensor]]:
        """Divide the centred advantages of a step by the deviation of its rewards, each sampled rollout counted once.

        Returns:
            The new stream `advantages` [B, T] of every micro-batch.
        """
        from triune.algorithms.rollouts import rollout_values

        rewards, present = rollout_values(batches, [batch.sampled_rewards for batch in batches], all_sum, num_rollouts)
        rewards = rewards[present]
        count = len(rewards) - (self.std == "sample")
        if count < 1 or bool((rewards == rewards[0]).all()):
            return [{"advantages": batch.advantages * 0.0} for batch in batches]
        scale = float(((rewards - rewards.mean()).square().sum() / count).sqrt())
        return [{"advantages": batch.advantages / (scale + self.epsilon)} for batch in batches]

    def check(self, where: str) -> None:
        """Raise ConfigError for ranks over the deviation of rewards: their units differ."""
        if self.rank and self.scale == "batch":
            found = "found `batch` with `rank: true`, whose values are no longer in the unit of the reward"
            raise ConfigError(f"{where}.scale", found, "", "write `scale: group`, or `rank: false`")
