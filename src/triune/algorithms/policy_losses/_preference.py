"""What losses over pairs share: one comparison per pair, its weight and margin, and the metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triune.algorithms.terms import Term, metric

if TYPE_CHECKING:
    from torch import Tensor

    from triune.algorithms.micro_batch import MicroBatch


def softplus(value: Tensor) -> Tensor:
    """log(1 + exp(value)) = -log sigmoid(-value), without overflow."""
    return value.logaddexp(value.new_zeros(()))


def margins(batch: MicroBatch) -> Tensor:
    """float32[P]: by how much the chosen half of each pair should at least win, as the data says."""
    return batch.halves(_per_sequence(batch, batch.margins, 0.0))[0]


def comparisons(batch: MicroBatch, loss: Tensor, chosen: Tensor, rejected: Tensor) -> list[Term]:
    """Yield `policy_loss` and metrics from a loss [P] and the implicit rewards [P] of both halves.

    A pair counts once, whatever its length and its weight: the mean over pairs of weight x loss. A pair of which one
    half has no token to train on is not counted. A tie counts half in `pair_accuracy`, so undecided is 0.5.
    """
    first, second = batch.halves(batch.segment_any(batch.action_mask))
    mask = first & second
    weights = batch.halves(_per_sequence(batch, batch.weights, 1.0))[0]
    gap = chosen.detach() - rejected.detach()
    return [
        Term("policy_loss", weights * loss, mask, per="pair"),
        metric("chosen_reward", chosen, mask, per="pair"),
        metric("rejected_reward", rejected, mask, per="pair"),
        metric("reward_margin", gap, mask, per="pair"),
        metric("pair_accuracy", (gap.sign() + 1) / 2, mask, per="pair"),
    ]


def _per_sequence(batch: MicroBatch, found: Tensor | None, otherwise: float) -> Tensor:
    if found is not None:
        return found
    return batch.tokens.new_full((batch.num_sequences,), otherwise, dtype=batch.logprobs.dtype)
