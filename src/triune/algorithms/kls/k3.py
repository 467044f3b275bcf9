"""The GRPO paper's KL estimate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from triune.algorithms.kls._penalty import Penalty, reverse_kl
from triune.registry import brick

if TYPE_CHECKING:
    from torch import Tensor

    from triune.algorithms.micro_batch import MicroBatch


@brick("kl")
@dataclass(frozen=True, kw_only=True)
class K3(Penalty):
    """Estimate KL(policy || reference) by ref / p - 1 + log(p / ref): unbiased, never negative, of low variance.

    The derivative of this expression is, on samples of the policy, that of the *forward* KL(reference || policy),
    which pulls harder on tokens the policy gave up and explodes where p is far below ref. `gradient: reverse` shows
    the value of k3 and descends the reverse KL; `gradient: forward` differentiates the expression, as published.
    Both are per token and given the prefix. In the reward k3 is biased: k1 is right there.

    Source: GRPO, arXiv:2402.03300, eq. 4; Schulman 2020, "Approximating KL divergence"; gradients: arXiv:2506.09477.

    Attributes:
        gradient: Which KL is descended in expectation.
    """

    gradient: Literal["reverse", "forward"] = "reverse"

    @property
    def expected_gradient(self) -> str:
        """Which KL is descended, when it is a term."""
        return f"{self.gradient}_kl" if self.place == "loss" else "nothing"

    @property
    def surrogate(self) -> str | None:
        """The brick whose value has the gradient that is descended, when it is not this one's."""
        return "k2" if self.gradient == "reverse" else None

    def estimate(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        """k3, descending the chosen KL."""
        log_ratio = logprobs - batch.ref_logprobs
        value = (-log_ratio).exp() - 1 + log_ratio
        return reverse_kl(value, log_ratio) if self.gradient == "reverse" else value
