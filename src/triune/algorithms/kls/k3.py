"""The GRPO paper's KL estimate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from triune.algorithms.kls._penalty import penalty, penalty_needs, reverse_kl
from triune.algorithms.progress import Progress
from triune.algorithms.terms import Term
from triune.registry import brick

if TYPE_CHECKING:
    from triune.algorithms.micro_batch import MicroBatch


@brick("kl")
@dataclass(frozen=True, kw_only=True)
class K3:
    """Estimate KL(policy || reference) by ref / p - 1 + log(p / ref): unbiased, never negative, of low variance.

    The derivative of this expression is, on samples of the policy, that of the *forward* KL(reference || policy),
    which pulls harder on tokens the policy gave up and explodes where p is far below ref. `gradient: reverse` shows
    the value of k3 and descends the reverse KL; `gradient: forward` differentiates the expression, as published.
    Both are per token and given the prefix.

    Source: GRPO, arXiv:2402.03300, eq. 4; Schulman 2020, "Approximating KL divergence"; gradients: arXiv:2506.09477.

    Attributes:
        coefficient: Weight of the term; the metric `kl` shows the plain estimate.
        gradient: Which KL is descended in expectation.
        on_flat_groups: Whether tokens without advantage (a group whose rewards are all equal) are held near the
            reference too.
    """

    coefficient: Annotated[float, Field(ge=0)] = 0.001
    gradient: Literal["reverse", "forward"] = "reverse"
    on_flat_groups: bool = True

    @property
    def needs(self) -> frozenset[str]:
        """Reference log-probs, and advantages where they tell which groups are flat."""
        return penalty_needs(self.on_flat_groups)

    def __call__(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """Yield `kl`."""
        log_ratio = batch.logprobs - batch.ref_logprobs
        value = (-log_ratio).exp() - 1 + log_ratio
        if self.gradient == "reverse":
            value = reverse_kl(value, log_ratio)
        return penalty(batch, value, self.coefficient, self.on_flat_groups)
