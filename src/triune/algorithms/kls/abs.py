"""The absolute log-ratio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from triune.algorithms.kls._penalty import Penalty
from triune.registry import brick

if TYPE_CHECKING:
    from torch import Tensor

    from triune.algorithms.micro_batch import MicroBatch


@brick("kl")
@dataclass(frozen=True, kw_only=True)
class Abs(Penalty):
    """Measure the distance to the reference by |log(p / ref)|: never negative, and above the KL.

    No estimate of a KL: on samples of the policy the gradient is that of the sum of |p - ref| over the vocabulary
    (twice the total variation), per token and given the prefix. Every token is pulled equally hard, however far it is.

    Source: `abs` of verl and TRL's first PPO trainer; the gradient follows from grad p = p grad log p.
    """

    descends: ClassVar[str] = "total_variation"

    def estimate(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        """|log(p / ref)|."""
        return (logprobs - batch.ref_logprobs).abs()
