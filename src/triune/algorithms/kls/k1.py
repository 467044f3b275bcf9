"""The log-ratio as KL estimate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from triune.algorithms.kls._penalty import Penalty, reverse_kl
from triune.registry import brick

if TYPE_CHECKING:
    from torch import Tensor

    from triune.algorithms.micro_batch import MicroBatch


@brick("kl")
@dataclass(frozen=True, kw_only=True)
class K1(Penalty):
    """Estimate KL(policy || reference) by log(p / ref): unbiased, of high variance, negative for single tokens.

    Its own derivative is 0 in expectation, so as a plain loss it would hold nothing: here the value is k1 and the
    gradient, on samples of the policy, is that of the reverse KL, per token and given the prefix. As everywhere when
    KL stands in the loss, what a token does to the KL of later tokens is not credited; `place: reward` credits it, and
    there k1 is the right estimate: its expected policy gradient is that of the reverse KL of whole answers.

    Source: Schulman 2020, "Approximating KL divergence"; gradients: arXiv:2506.09477.
    """

    surrogate: ClassVar[str] = "k2"

    def estimate(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        """log(p / ref), descending the reverse KL."""
        log_ratio = logprobs - batch.ref_logprobs
        return reverse_kl(log_ratio, log_ratio)
