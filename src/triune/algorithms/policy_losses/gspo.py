"""PPO's clip on whole sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from triune.algorithms.policy_losses._surrogate import clipped
from triune.algorithms.progress import Progress
from triune.algorithms.terms import Term, averaged, metric
from triune.registry import brick

if TYPE_CHECKING:
    from triune.algorithms.micro_batch import MicroBatch


@brick("policy_loss")
@dataclass(frozen=True, kw_only=True)
class GSPO:
    """Clip the length-normalised ratio of the whole sequence, because the reward is the whole sequence's too.

    With s = exp(mean over trained tokens of new - old), the loss of a sequence is -min(s A, clip(s) A), averaged over
    sequences: the averaging belongs to the method and is no option. A is the mean of the sequence's advantages.
    `token_level` is GSPO-token: s without gradient times p / p-without-gradient, so that every token keeps its own
    advantage; with equal advantages value and gradient are the same. The clip is a thousandth of PPO's because the mean
    log-ratio of many tokens moves little. It is also below the gap between a sampler and a trainer that round
    differently, so the old policy's log-probs are always recomputed.

    On-policy the expected gradient is the policy gradient with every sequence's tokens averaged. Off-policy the
    geometric mean is no importance weight: it is biased, with far less variance than the product.

    Source: GSPO, arXiv:2507.18071, sections 4.1 and 4.3.

    Attributes:
        clip_low: How far below 1 the ratio may fall with gradient.
        clip_high: How far above 1 it may rise.
        token_level: Whether every token keeps its own advantage.
        missing_behaviour: What to do with tokens whose behaviour log-prob is unknown: leave them out, or use the old
            policy's.
    """

    clip_low: Annotated[float, Field(gt=0, le=1)] = 3e-4
    clip_high: Annotated[float, Field(gt=0)] = 4e-4
    token_level: bool = False
    missing_behaviour: Literal["exclude", "use_old"] = "exclude"
    needs: ClassVar[frozenset[str]] = frozenset({"advantages", "old_logprobs"})
    expected_gradient: ClassVar[str] = "policy_gradient"

    @property
    def surrogate(self) -> str | None:
        """With `token_level` the ratio of the sequence is a constant for the gradient."""
        return "stop_gradient" if self.token_level else None

    def __call__(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """Yield `policy_loss`, and the metrics `ratio_mean` and `clip_ratio`, all per sequence."""
        mask = batch.ratio_mask(self.missing_behaviour)
        mean_S = batch.segment_mean(batch.logprobs - batch.old_logprobs, mask)
        if not self.token_level:
            present_S, ratio_S = batch.segment_any(mask), mean_S.exp()
            advantages_S = batch.segment_mean(batch.advantages, mask)
            loss_S, is_clipped_S = clipped(ratio_S, advantages_S, self.clip_low, self.clip_high)
            return [
                Term("policy_loss", loss_S, present_S, per="sequence"),
                metric("ratio_mean", ratio_S, present_S, per="sequence"),
                metric("clip_ratio", is_clipped_S.to(ratio_S.dtype), present_S, per="sequence"),
            ]
        ratio = batch.spread(mean_S.detach()).exp() * (batch.logprobs - batch.logprobs.detach()).exp()
        loss, is_clipped = clipped(ratio, batch.advantages, self.clip_low, self.clip_high)
        shown = [metric("ratio_mean", ratio, mask), metric("clip_ratio", is_clipped.to(ratio.dtype), mask)]
        return [averaged(term, batch, "sequence") for term in (Term("policy_loss", loss, mask), *shown)]
