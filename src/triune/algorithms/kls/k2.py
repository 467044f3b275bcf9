"""Half the squared log-ratio as KL estimate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from triune.algorithms.kls._penalty import Penalty, reverse_kl
from triune.registry import brick

if TYPE_CHECKING:
    from torch import Tensor

    from triune.algorithms.micro_batch import MicroBatch


@brick("kl")
@dataclass(frozen=True, kw_only=True)
class K2(Penalty):
    """Estimate KL(policy || reference) by log(p / ref)² / 2: never negative, of low variance, biased when far.

    Its own derivative is, on samples of the policy, that of the reverse KL, per token and given the prefix: the value
    is an approximation, the gradient is not. In the reward it is biased, as all but k1 are.

    Source: Schulman 2020, "Approximating KL divergence"; gradients: arXiv:2506.09477.
    """

    def estimate(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        """Half the squared log-ratio."""
        log_ratio = logprobs - batch.ref_logprobs
        return reverse_kl(log_ratio.square() / 2, log_ratio)
