"""k3, corrected for stale samples."""

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
class CorrectedK3(Penalty):
    """Estimate KL(policy || reference) by r k3 with r = p / behaviour: unbiased on samples of another policy too.

    The gradient runs through r as well. Its derivative by log p is r log(p / ref), so value and gradient both are those
    of the reverse KL, whatever policy sampled, per token and given the prefix (plain k3 descends the forward KL, and
    neither off-policy). A token whose behaviour log-prob is unknown counts as sampled by the policy itself.

    Source: DeepSeek-V3.2, arXiv:2512.02556, eq. 7.
    """

    off_policy: ClassVar[str] = "exact"

    def estimate(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        """k3 times the importance ratio."""
        log_ratio = logprobs - batch.ref_logprobs
        behaviour = batch.streams.get("behaviour_logprobs", logprobs).detach()
        ratio = (logprobs - behaviour.where(batch.known_behaviour, logprobs.detach())).exp()
        return ratio * ((-log_ratio).exp() - 1 + log_ratio)
