"""Online policy mirror descent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from triune.algorithms.progress import Progress
from triune.algorithms.terms import Average, Term, averaged, check_average, metric
from triune.registry import brick

if TYPE_CHECKING:
    from triune.algorithms.micro_batch import MicroBatch


@brick("policy_loss")
@dataclass(frozen=True, kw_only=True)
class OPMD:
    """REINFORCE that is held near the policy that began the step, by the square of the sequence's log-ratio.

    The loss of a sequence is -A log p(y) + tau / 2 x (log p(y) - log old(y))², the surrogate of the mirror-descent
    optimum old(y) x exp(r / tau) / Z with the baseline of the advantage in place of tau log Z. It takes any data; no
    clip, no importance weight. `regulariser: absorbed` is its first step, -A log p / (1 + tau): where the policy still
    is the old one the square has no gradient, and what is left of it is a smaller step.

    On-policy the expected gradient is the policy gradient (divided by 1 + tau when absorbed).

    Source: Kimi k1.5, arXiv:2501.12599, section 2.3; arXiv:2509.24203; `absorbed`: Trinity-RFT, arXiv:2505.17826.

    Attributes:
        tau: Strength of the regulariser, in reward per squared nat.
        regulariser: `squared` as published, or `absorbed` in the step size.
        average: How tokens of the first part are averaged; the published one is the sequence's sum.
        length: Tokens to divide by, with `average: constant`.
    """

    tau: Annotated[float, Field(gt=0)] = 1.0
    regulariser: Literal["squared", "absorbed"] = "squared"
    average: Average = "sequence_sum"
    length: Annotated[int, Field(gt=0)] | None = None
    needs: ClassVar[frozenset[str]] = frozenset({"advantages"})
    expected_gradient: ClassVar[str] = "policy_gradient"

    @property
    def gradient_scale(self) -> float:
        """How many times the policy gradient it is."""
        return 1.0 if self.regulariser == "squared" else 1 / (1 + self.tau)

    def __call__(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """Yield `policy_loss`, and `policy_distance`: the squared log-ratio of a sequence, a term when `squared`."""
        mask = batch.action_mask
        loss = Term("policy_loss", -batch.advantages * batch.logprobs, mask, weight=self.gradient_scale)
        distance_S = batch.segment_sum(batch.logprobs - batch.old_logprobs, mask).square()
        distance = metric("policy_distance", distance_S, batch.segment_any(mask), per="sequence")
        if self.regulariser == "squared":
            distance = Term("policy_distance", distance_S, distance.mask, weight=self.tau / 2, per="sequence")
        return [averaged(loss, batch, self.average, self.length), distance]

    def check(self, where: str) -> None:
        """Raise ConfigError when `average` and `length` do not fit."""
        check_average(self.average, self.length, where)
