"""What all KL estimators share: the term, its mask, and the gradient of the reverse KL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triune.algorithms.terms import Term

if TYPE_CHECKING:
    from torch import Tensor

    from triune.algorithms.micro_batch import MicroBatch


def reverse_kl(estimate: Tensor, log_ratio: Tensor) -> Tensor:
    """Show `estimate`, but descend the reverse KL.

    The gradient of KL(policy || reference) is E[log_ratio x grad log p] over the policy's samples (the score function;
    the term E[grad log_ratio] is 0). So the value is the estimate and its derivative by log p is the log-ratio.
    """
    surrogate = log_ratio.detach() * log_ratio
    return estimate.detach() + surrogate - surrogate.detach()


def penalty_needs(on_flat_groups: bool) -> frozenset[str]:
    """Streams that `penalty` reads beside the log-probs."""
    return frozenset({"ref_logprobs"} if on_flat_groups else {"ref_logprobs", "advantages"})


def penalty(batch: MicroBatch, value: Tensor, coefficient: float, on_flat_groups: bool) -> list[Term]:
    """The term `kl`, per token; its metric is never multiplied by the coefficient."""
    mask = batch.action_mask
    if not on_flat_groups:
        mask = mask & (batch.advantages != 0)
    return [Term("kl", value, mask, weight=coefficient)]
