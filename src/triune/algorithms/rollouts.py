"""Values of rollouts, each counted once, however its sequences were split over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from triune.algorithms.divider import AllSum
from triune.algorithms.micro_batch import MicroBatch


def rollout_values(
    batches: Sequence[MicroBatch], values: Sequence[Tensor | None], all_sum: AllSum, num_rollouts: int
) -> tuple[Tensor, Tensor]:
    """Bring a value per sequence, equal within a rollout, together over all ranks.

    Args:
        batches: This rank's micro-batches of the step.
        values: [S] for each of them; NaN where unknown.
        all_sum: Sum over ranks.
        num_rollouts: R, rollouts of the step over all ranks.

    Returns:
        float64[R], and bool[R] whether the rollout has a known value. The same on all ranks.
    """
    device = batches[0].tokens.device if batches else torch.device("cpu")
    totals = torch.zeros(2, num_rollouts, dtype=torch.float64, device=device)
    for batch, value_S in zip(batches, values, strict=True):
        assert value_S is not None, "a batch without rewards"
        known = ~value_S.isnan()
        owner = batch.rollout_numbers[known]
        totals[0].index_add_(0, owner, value_S[known].double())
        totals[1].index_add_(0, owner, torch.ones_like(owner, dtype=torch.float64))
    summed, counted = all_sum(totals.reshape(-1)).reshape(2, -1)
    return summed / counted.clamp(min=1), counted > 0
