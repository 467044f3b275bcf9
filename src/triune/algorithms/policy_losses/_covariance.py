"""How far advantage and log-prob of a token deviate together: what makes the entropy fall.

A covariance takes the mean over the whole update, which no micro-batch knows. The means here are those of the update
before, kept in the brick's state: the result depends neither on micro-batches nor on ranks, and lags by one update.

Source: arXiv:2505.22617, section 4.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from triune.algorithms.terms import Term, metric

if TYPE_CHECKING:
    from torch import Tensor

    from triune.algorithms.micro_batch import MicroBatch


def covariance(batch: MicroBatch, state: Mapping[str, Any]) -> Tensor | None:
    """[B, T] without gradient: (A - mean A) x (log p - mean log p); None before the first update, without means."""
    if state["mean_advantage"] is None:
        return None
    return (batch.advantages - state["mean_advantage"]) * (batch.logprobs.detach() - state["mean_logprob"])


def means(batch: MicroBatch, mask: Tensor) -> list[Term]:
    """The metrics that `measured` reads."""
    return [metric("advantage_mean", batch.advantages, mask), metric("logprob_mean", batch.logprobs, mask)]


def measured(state: Mapping[str, Any], stats: Mapping[str, float]) -> dict[str, Any]:
    """The state with the means of the update that was made; unchanged when it had no token."""
    if "advantage_mean" not in stats:
        return dict(state)
    return {**state, "mean_advantage": stats["advantage_mean"], "mean_logprob": stats["logprob_mean"]}
