"""What several policy losses share: the clipped surrogate, and the ratio between the old policy and the behaviour."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from triune.algorithms.micro_batch import MicroBatch


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """The loss -min(r A, clip(r) A), and bool whether the clip decided it (then it has no gradient)."""
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - low, 1 + high)
    return free.maximum(bounded), bounded > free


def above_behaviour(batch: MicroBatch, logprobs: Tensor) -> Tensor:
    """[B, T]: log-probs minus the behaviour's, without gradient; 0 where the behaviour is unknown."""
    found = logprobs.detach() - batch.behaviour_logprobs
    return found.where(batch.known_behaviour, found.new_zeros(()))


def with_weight(batch: MicroBatch, weight: Tensor) -> MicroBatch:
    """The batch with advantages times a weight [B, T], at least 0: every loss linear in A is multiplied by it.

    A weight of 0 takes a token's gradient and not its place in a count: `has_advantage` answers as before.
    """
    plain = batch.streams.get("unweighted_advantages", batch.advantages)
    streams = {**batch.streams, "advantages": batch.advantages * weight, "unweighted_advantages": plain}
    return replace(batch, streams=streams)


def has_advantage(batch: MicroBatch) -> Tensor:
    """bool[B, T]: tokens whose advantage is not 0, whatever weight it was given."""
    return batch.streams.get("unweighted_advantages", batch.advantages) != 0
