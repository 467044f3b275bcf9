"""Every part of the reward normalised on its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from triune.algorithms.advantages._statistics import standardised
from triune.algorithms.credit import credit
from triune.errors import RecordError
from triune.records import Experience, Group
from triune.registry import brick

if TYPE_CHECKING:
    from torch import Tensor

    from triune.algorithms.divider import AllSum
    from triune.algorithms.micro_batch import MicroBatch


@brick("advantage", "gdpo")
@dataclass(frozen=True, kw_only=True)
class GDPOAdvantage:
    """Normalise each reward part in its group, add them up with weights, then whiten the sum over the batch.

    A = sum over parts k of w_k (r_k - mean_k) / std_k. GRPO adds first: then different combinations of parts that have
    the same sum look alike, and the part with the largest spread drowns the others. The unit of a part is without
    effect; its weight alone says how much it matters. A part that is flat in the group adds 0.

    Reads `reward_parts`, not the reward: penalties that operators add to the reward are not seen. `drop_flat_groups`
    compares one number; give it the `part` that must differ.

    Source: GDPO, arXiv:2601.05242.

    Attributes:
        weights: Weight per reward part; parts not named are left out. Empty = all parts, each with weight 1.
        whiten: Whether the sum is whitened over the rollouts of the batch, so that its size does not grow with the
            number of parts. Its mean is 0 already, so groups without spread stay at 0.
        std: `sample` divides the squares by G - 1, `population` by G.
        epsilon: Added to every deviation.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    whiten: bool = True
    std: Literal["sample", "population"] = "sample"
    epsilon: float = 1e-6
    least_group: ClassVar[int] = 2

    @property
    def where(self) -> str:
        """`trainer` when the sum is whitened over the batch."""
        return "trainer" if self.whiten else "pipeline"

    def __call__(self, group: Group) -> Group:
        """Add up the normalised parts.

        Raises:
            RecordError: A rollout lacks a part; the group is dropped.
        """
        rows = [rows[0] for rows in group.valid_members.values()]
        weights = self.weights or dict.fromkeys(rows[0].reward_parts if rows else (), 1.0)
        if rows and not weights:
            do = "return Reward(parts={…}), or choose `advantage: grpo`"
            raise RecordError(str(rows[0].id), "no reward parts", "at least one", do)
        columns = [
            [weight * value for value in standardised([_part(row, name) for row in rows], self.std, self.epsilon)]
            for name, weight in weights.items()
        ]
        return credit(group, [math.fsum(values) for values in zip(*columns, strict=True)])

    def over_batch(
        self, batches: Sequence[MicroBatch], all_sum: AllSum, num_rollouts: int
    ) -> list[Mapping[str, Tensor]]:
        """Whiten the sums over the rollouts of the step."""
        from triune.algorithms.advantages._batch import whitened

        values = [batch.advantages for batch in batches]
        found = whitened(
            batches, values, over="rollouts", epsilon=self.epsilon, all_sum=all_sum, num_rollouts=num_rollouts
        )
        return [{"advantages": value} for value in found]


def _part(row: Experience, name: str) -> float:
    if name not in row.reward_parts:
        have = ", ".join(row.reward_parts) or "none"
        raise RecordError(str(row.id), f"no reward part {name!r}", f"one of its parts ({have})")
    return row.reward_parts[name]
