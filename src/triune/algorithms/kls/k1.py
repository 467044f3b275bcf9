"""The log-ratio as KL estimate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from triune.algorithms.kls._penalty import penalty, penalty_needs, reverse_kl
from triune.algorithms.progress import Progress
from triune.algorithms.terms import Term
from triune.registry import brick

if TYPE_CHECKING:
    from triune.algorithms.micro_batch import MicroBatch


@brick("kl")
@dataclass(frozen=True, kw_only=True)
class K1:
    """Estimate KL(policy || reference) by log(p / ref): unbiased, of high variance, negative for single tokens.

    Its own derivative is 0 in expectation, so as a plain loss it would hold nothing: here the value is k1 and the
    gradient, on samples of the policy, is that of the reverse KL, per token and given the prefix. As everywhere when
    KL stands in the loss, what a token does to the KL of later tokens is not credited.

    Source: Schulman 2020, "Approximating KL divergence"; gradients: arXiv:2506.09477.

    Attributes:
        coefficient: Weight of the term; the metric `kl` shows the plain estimate.
        on_flat_groups: Whether tokens without advantage (a group whose rewards are all equal) are held near the
            reference too.
    """

    coefficient: Annotated[float, Field(ge=0)] = 0.001
    on_flat_groups: bool = True

    @property
    def needs(self) -> frozenset[str]:
        """Reference log-probs, and advantages where they tell which groups are flat."""
        return penalty_needs(self.on_flat_groups)

    def __call__(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """Yield `kl`."""
        log_ratio = batch.logprobs - batch.ref_logprobs
        value = reverse_kl(log_ratio, log_ratio)
        return penalty(batch, value, self.coefficient, self.on_flat_groups)
