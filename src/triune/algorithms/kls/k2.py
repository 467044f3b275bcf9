"""Half the squared log-ratio as KL estimate."""

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
class K2:
    """Estimate KL(policy || reference) by log(p / ref)² / 2: never negative, of low variance, biased when far.

    Its own derivative is, on samples of the policy, that of the reverse KL, per token and given the prefix: the value
    is an approximation, the gradient is not.

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
        value = reverse_kl(log_ratio.square() / 2, log_ratio)
        return penalty(batch, value, self.coefficient, self.on_flat_groups)
