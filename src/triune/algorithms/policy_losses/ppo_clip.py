"""PPO's clipped surrogate."""

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
class PPOClip:
    """Follow the advantage per token until the probability ratio leaves [1 - clip_low, 1 + clip_high].

    With ratio r = exp(new - old), the loss is -min(r A, clip(r) A). Raising `clip_high` alone leaves room for unlikely
    tokens to grow (DAPO's .2/.28). Dual clip bounds the loss of a token with A < 0 by -dual_clip x A, so one token that
    became much likelier cannot dominate a step.

    Where the old policy is the current one, the expected gradient is the policy gradient; the clip makes it biased
    afterwards, by design.

    Source: PPO, arXiv:1707.06347, eq. 7; dual clip, arXiv:1912.09729, eq. 5; clip-higher, DAPO, arXiv:2503.14476.

    Attributes:
        clip_low: How far below 1 the ratio may fall with gradient.
        clip_high: How far above 1 it may rise.
        dual_clip: Bound on the loss in units of -A for tokens with A < 0, above 1; null = none.
        average: How tokens are averaged.
        length: Tokens to divide by, with `average: constant`.
        missing_behaviour: What to do with tokens whose behaviour log-prob is unknown: leave them out, or use the old
            policy's.
    """

    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    average: Average = "token"
    length: Annotated[int, Field(gt=0)] | None = None
    missing_behaviour: Literal["exclude", "use_old"] = "exclude"
    needs: ClassVar[frozenset[str]] = frozenset({"advantages"})
    expected_gradient: ClassVar[str] = "policy_gradient"
    off_policy: ClassVar[str] = "inside_clip"
    variants: ClassVar[tuple[Mapping[str, Any], ...]] = ({"dual_clip": 1.5, "clip_high": 0.28},)

    def __call__(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """Yield `policy_loss`, and the metrics `ratio_mean` and `clip_ratio`."""
        mask, advantages = batch.ratio_mask(self.missing_behaviour), batch.advantages
        ratio = (batch.logprobs - batch.old_logprobs).exp()
        free = -advantages * ratio
        clipped = -advantages * ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss, is_clipped = free.maximum(clipped), clipped > free
        if self.dual_clip is not None:
            bound = -advantages * self.dual_clip
            is_bounded = (advantages < 0) & (loss > bound)
            loss, is_clipped = bound.where(is_bounded, loss), is_clipped | is_bounded
        return [
            averaged(Term("policy_loss", loss, mask), batch, self.average, self.length),
            metric("ratio_mean", ratio, mask),
            metric("clip_ratio", is_clipped.to(ratio.dtype), mask),
        ]

    def check(self, where: str) -> None:
        """Raise ConfigError when `average` and `length` do not fit."""
        check_average(self.average, self.length, where)
