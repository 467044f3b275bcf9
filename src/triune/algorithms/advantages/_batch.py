"""What advantages of a whole step share: returns of tokens, and whitening over all micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from triune.algorithms.divider import AllSum
from triune.algorithms.micro_batch import MicroBatch

Unit = Literal["tokens", "rollouts"]
"""tokens: every trained token weighs alike, so long answers decide. rollouts: every rollout weighs alike."""


def returns_to_go(batch: MicroBatch, rewards: Tensor | None, final: Tensor | None, discount: float) -> Tensor:
    """Discounted sum of what a token and all later trained tokens of its sequence are paid.

    Time passes with trained tokens only: prompts and tool output between them are no steps. Every sequence is an
    episode of its own and ends with `final`.

    Args:
        batch: Tells which tokens are trained, and which sequence they belong to, in either layout.
        rewards: [B, T], paid at each token; None = 0.
        final: [S], paid at the last trained token of each sequence; None = 0.
        discount: Factor per token, in [0, 1].

    Returns:
        float64[B, T], 0 outside the action mask.
    """
    shape, size = batch.action_mask.shape, batch.num_sequences
    places = batch.action_mask.reshape(-1).nonzero().squeeze(1)
    owners = batch.spread(torch.arange(size, device=places.device)).reshape(-1)[places]
    order = owners.argsort(stable=True)
    places, owners = places[order], owners[order]
    counts = owners.bincount(minlength=size)
    last = int(counts.max()) if size else 0
    # One line per sequence, aligned on the right: its last trained token stands in the last column.
    columns = torch.arange(len(places), device=places.device) - (counts.cumsum(0))[owners] + last
    table = torch.zeros(size, last, dtype=torch.float64, device=places.device)
    if rewards is not None:
        table[owners, columns] = rewards.reshape(-1)[places].double()
    if final is not None and last:
        table[:, -1] += final.double()
    shift = 1
    while shift < last:  # doubles the reach: a sum over n tokens takes log2(n) additions
        table[:, :-shift] = table[:, :-shift] + discount**shift * table[:, shift:]
        shift *= 2
    found = torch.zeros(shape.numel(), dtype=torch.float64, device=places.device)
    found[places] = table[owners, columns]
    return found.reshape(shape)


def whitened(
    batches: Sequence[MicroBatch],
    values: Sequence[Tensor],
    *,
    over: Unit,
    epsilon: float,
    all_sum: AllSum,
    num_rollouts: int,
) -> list[Tensor]:
    """Subtract the mean of a step and divide by its (population) deviation plus epsilon.

    Args:
        batches: This rank's micro-batches of the step.
        values: [B, T] for each of them; NaN where unknown: such tokens enter no statistic and get 0, like those that an
            expert wrote.
        over: What weighs alike in mean and deviation.
        epsilon: Added to the deviation.
        all_sum: Sum over ranks, entered equally often by every rank.
        num_rollouts: R, rollouts of the step over all ranks.

    Returns:
        float32[B, T] for each micro-batch; exactly 0 where all values of the step are equal.
    """
    sampled = [batch.not_made_by("expert").action_mask for batch in batches]
    masks = [mask & ~value.isnan() for mask, value in zip(sampled, values, strict=True)]
    known = [value.double().where(mask, 0.0) for value, mask in zip(values, masks, strict=True)]
    weights = _weights(batches, masks, over, all_sum, num_rollouts)
    device = batches[0].tokens.device if batches else torch.device("cpu")
    nothing = torch.zeros(2, dtype=torch.float64, device=device)
    sums = [torch.stack([(weight * value).sum(), weight.sum()]) for weight, value in zip(weights, known, strict=True)]
    total, count = all_sum(torch.stack([nothing, *sums]).sum(0))
    mean = total / count.clamp(min=1e-12)
    squares = [(weight * (value - mean).square()).sum() for weight, value in zip(weights, known, strict=True)]
    deviation = (all_sum(torch.stack([nothing[0], *squares]).sum(0, keepdim=True)) / count.clamp(min=1e-12)).sqrt()
    if float(deviation) <= 1e-12 * abs(float(mean)):  # all equal, but for the rounding of their mean
        return [torch.zeros_like(value, dtype=torch.float32) for value in known]
    if abs(float(mean)) <= 1e-6 * float(deviation):  # the mean of centred values, rounded: leave their zeros alone
        mean = torch.zeros_like(mean)
    scaled = [(value - mean) / (deviation + epsilon) for value in known]
    return [value.where(mask, 0.0).float() for value, mask in zip(scaled, masks, strict=True)]


def _weights(
    batches: Sequence[MicroBatch], masks: Sequence[Tensor], over: Unit, all_sum: AllSum, num_rollouts: int
) -> list[Tensor]:
    """float64[B, T]: weight of each token in the statistics."""
    if over == "tokens":
        return [mask.double() for mask in masks]
    device = batches[0].tokens.device if batches else torch.device("cpu")
    tokens_R = torch.zeros(num_rollouts, dtype=torch.float64, device=device)
    for batch, mask in zip(batches, masks, strict=True):
        tokens_R.index_add_(0, batch.rollout_numbers, batch.segment_count(mask).double())
    tokens_R = all_sum(tokens_R).clamp(min=1)
    return [
        mask.double() / batch.spread(tokens_R[batch.rollout_numbers])
        for batch, mask in zip(batches, masks, strict=True)
    ]
