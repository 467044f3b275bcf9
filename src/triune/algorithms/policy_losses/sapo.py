"""A smooth gate instead of a clip."""

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
class SAPO:
    """Let a token's gradient fade as its ratio leaves 1, instead of cutting it off.

    With r = exp(new - old) the loss is -g(r) A with g(r) = sigmoid(tau (r - 1)) x 4 / tau. The gradient runs through
    the gate: its weight on -A grad log p is 4 s (1 - s) r with s = sigmoid(tau (r - 1)), which is 1 at r = 1 and falls
    on both sides. A larger tau fades faster; tokens with A < 0 get one, because what they push up is every other
    token of the vocabulary.

    On-policy the expected gradient is the policy gradient; off-policy it is biased towards it, by the gate.

    Source: SAPO, arXiv:2511.20347.

    Attributes:
        tau_positive: Steepness of the gate where A > 0.
        tau_negative: Steepness where A is not.
        average: How tokens are averaged; the paper's mean is per sequence.
        length: Tokens to divide by, with `average: constant`.
        missing_behaviour: What to do with tokens whose behaviour log-prob is unknown: leave them out, or use the old
            policy's.
    """

    tau_positive: Annotated[float, Field(gt=0)] = 1.0
    tau_negative: Annotated[float, Field(gt=0)] = 1.05
    average: Average = "sequence"
    length: Annotated[int, Field(gt=0)] | None = None
    missing_behaviour: Literal["exclude", "use_old"] = "exclude"
    needs: ClassVar[frozenset[str]] = frozenset({"advantages"})
    expected_gradient: ClassVar[str] = "policy_gradient"

    def __call__(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """Yield `policy_loss`, and the metrics `ratio_mean` and `gate_mean` (the gradient's weight)."""
        mask, advantages = batch.ratio_mask(self.missing_behaviour), batch.advantages
        ratio = (batch.logprobs - batch.old_logprobs).exp()
        is_positive = advantages > 0
        tau = advantages.new_full((), self.tau_positive).where(is_positive, advantages.new_tensor(self.tau_negative))
        gate = 1 / (1 + (tau * (1 - ratio)).exp())  # torch.sigmoid rounds by a token's place in the row
        loss = Term("policy_loss", -advantages * gate * 4 / tau, mask)
        return [
            averaged(loss, batch, self.average, self.length),
            metric("ratio_mean", ratio, mask),
            metric("gate_mean", 4 * gate * (1 - gate) * ratio, mask),
        ]

    def check(self, where: str) -> None:
        """Raise ConfigError when `average` and `length` do not fit."""
        check_average(self.average, self.length, where)
