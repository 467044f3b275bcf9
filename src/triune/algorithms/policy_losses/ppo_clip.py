"""PPO's clipped surrogate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from triune.algorithms.policy_losses._surrogate import above_behaviour, clipped
from triune.algorithms.progress import Progress
from triune.algorithms.terms import Average, Term, averaged, check_average, metric
from triune.registry import brick

if TYPE_CHECKING:
    from triune.algorithms.micro_batch import MicroBatch


@brick("policy_loss")
@dataclass(frozen=True, kw_only=True)
class PPOClip:
    """Follow the advantage per token until the probability ratio leaves [1 - clip_low, 1 + clip_high].

    With ratio r = exp(new - old), the loss is -min(r A, clip(r) A). Raising `clip_high` alone leaves room for unlikely
    tokens to grow (DAPO's .2/.28). Dual clip bounds the loss of a token with A < 0 by -dual_clip x A, so one token that
    became much likelier cannot dominate a step.

    Where the old policy is the current one, the expected gradient is the policy gradient; the clip makes it biased
    afterwards, by design.

    `sequence_mask` drops what the policy already left: the tokens with A < 0 of a sequence whose mean of
    behaviour - new log-probs exceeds the bound lose value and gradient, and stay in the count.

    Source: PPO, arXiv:1707.06347, eq. 7; dual clip, arXiv:1912.09729, eq. 5; clip-higher, DAPO, arXiv:2503.14476;
    sequence mask, DeepSeek-V3.2, arXiv:2512.02556, section 3.1.

    Attributes:
        clip_low: How far below 1 the ratio may fall with gradient.
        clip_high: How far above 1 it may rise.
        dual_clip: Bound on the loss in units of -A for tokens with A < 0, above 1; null = none.
        sequence_mask: Largest mean log-ratio of behaviour over policy, in nats per token, of a sequence whose tokens
            with A < 0 still count; null = any.
        average: How tokens are averaged.
        length: Tokens to divide by, with `average: constant`.
        missing_behaviour: What to do with tokens whose behaviour log-prob is unknown: leave them out, or use the old
            policy's.
    """

    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    sequence_mask: Annotated[float, Field(ge=0)] | None = None
    average: Average = "token"
    length: Annotated[int, Field(gt=0)] | None = None
    missing_behaviour: Literal["exclude", "use_old"] = "exclude"
    needs: ClassVar[frozenset[str]] = frozenset({"advantages"})
    expected_gradient: ClassVar[str] = "policy_gradient"
    off_policy: ClassVar[str] = "inside_clip"
    variants: ClassVar[tuple[Mapping[str, Any], ...]] = ({"dual_clip": 1.5, "clip_high": 0.28}, {"sequence_mask": 0.05})

    def __call__(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """Yield `policy_loss`, and the metrics `ratio_mean`, `clip_ratio` and, with a mask, `sequence_masked_ratio`."""
        mask, advantages = batch.ratio_mask(self.missing_behaviour), batch.advantages
        ratio, shown = (batch.logprobs - batch.old_logprobs).exp(), []
        loss, is_clipped = clipped(ratio, advantages, self.clip_low, self.clip_high)
        if self.dual_clip is not None:
            bound = -advantages * self.dual_clip
            is_bounded = (advantages < 0) & (loss > bound)
            loss, is_clipped = bound.where(is_bounded, loss), is_clipped | is_bounded
        if self.sequence_mask is not None:
            drift_S = -batch.segment_mean(above_behaviour(batch, batch.logprobs), mask)
            is_dropped = batch.spread(drift_S > self.sequence_mask) & (advantages < 0)
            loss = loss.where(~is_dropped, loss.new_zeros(()))
            shown = [metric("sequence_masked_ratio", is_dropped.to(ratio.dtype), mask)]
        return [
            averaged(Term("policy_loss", loss, mask), batch, self.average, self.length),
            metric("ratio_mean", ratio, mask),
            metric("clip_ratio", is_clipped.to(ratio.dtype), mask),
            *shown,
        ]

    def check(self, where: str) -> None:
        """Raise ConfigError when `average` and `length` do not fit."""
        check_average(self.average, self.length, where)
