"""k3 with bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from triune.algorithms.kls._penalty import reverse_kl
from triune.algorithms.kls.k3 import K3
from triune.registry import brick

if TYPE_CHECKING:
    from torch import Tensor

    from triune.algorithms.micro_batch import MicroBatch


@brick("kl")
@dataclass(frozen=True, kw_only=True)
class LowVariance(K3):
    """Estimate KL(policy || reference) by k3 of a clamped log-ratio, clamped again, as several trainers do.

    The bounds keep one token from overflowing. They are far out, and where they bind the estimate is too low and, with
    `gradient: forward`, has no slope: such a token is no longer pulled back, though it needs it most. Inside them the
    gradient is, on samples of the policy, that of the chosen KL, per token and given the prefix. In the reward it is
    biased, as k3 is.

    Source: Schulman 2020, "Approximating KL divergence"; `low_var_kl` of verl.

    Attributes:
        gradient: Which KL is descended in expectation; `forward` is in use.
        most_log_ratio: Bound on |log(p / ref)|.
        most_value: Bound on the estimate.
    """

    gradient: Literal["reverse", "forward"] = "forward"
    most_log_ratio: Annotated[float, Field(gt=0)] = 20.0
    most_value: Annotated[float, Field(gt=0)] = 10.0

    def estimate(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        """k3 within bounds, descending the chosen KL."""
        log_ratio = logprobs - batch.ref_logprobs
        bounded = log_ratio.clamp(-self.most_log_ratio, self.most_log_ratio)
        value = ((-bounded).exp() - 1 + bounded).clamp(max=self.most_value)
        return reverse_kl(value, log_ratio) if self.gradient == "reverse" else value
