"""A clipped importance weight that keeps every token's gradient."""

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
class CISPO:
    """Weigh -A log p by the clipped ratio, as a constant: no token loses its gradient, however far its ratio is.

    With r = exp(new - old) the loss is -A x clip(r, 1 - clip_low, 1 + clip_high).detach() x log p. PPO's clip drops
    rare but decisive tokens after the first update; here they only count no more than the cap. The bound is 1 + eps as
    in the paper: where others write the cap itself, 5, write `clip_high: 4`. By default there is no lower bound.

    On-policy the expected gradient is the policy gradient; off-policy it is, given the prefix, up to the bounds.

    Source: CISPO, arXiv:2506.13585, section 3.1; the cap of 5, arXiv:2510.13786.

    Attributes:
        clip_low: How far below 1 the weight may fall; 1 = no lower bound.
        clip_high: How far above 1 it may rise.
        average: How tokens are averaged.
        length: Tokens to divide by, with `average: constant`.
        missing_behaviour: What to do with tokens whose behaviour log-prob is unknown: leave them out, or use the old
            policy's.
    """

    clip_low: Annotated[float, Field(gt=0, le=1)] = 1.0
    clip_high: Annotated[float, Field(gt=0)] = 4.0
    average: Average = "token"
    length: Annotated[int, Field(gt=0)] | None = None
    missing_behaviour: Literal["exclude", "use_old"] = "exclude"
    needs: ClassVar[frozenset[str]] = frozenset({"advantages"})
    expected_gradient: ClassVar[str] = "policy_gradient"
    off_policy: ClassVar[str] = "inside_clip"
    surrogate: ClassVar[str] = "stop_gradient"

    def __call__(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """Yield `policy_loss`, and the metrics `ratio_mean` and `clip_ratio`."""
        mask = batch.ratio_mask(self.missing_behaviour)
        ratio = (batch.logprobs - batch.old_logprobs).exp().detach()
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = Term("policy_loss", -batch.advantages * weight * batch.logprobs, mask)
        return [
            averaged(loss, batch, self.average, self.length),
            metric("ratio_mean", ratio, mask),
            metric("clip_ratio", (weight != ratio).to(ratio.dtype), mask),
        ]

    def check(self, where: str) -> None:
        """Raise ConfigError when `average` and `length` do not fit."""
        check_average(self.average, self.length, where)
