"""Tapered off-policy REINFORCE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from triune.algorithms.policy_losses._surrogate import above_behaviour
from triune.algorithms.progress import Progress
from triune.algorithms.terms import Average, Term, averaged, check_average, metric
from triune.registry import brick

if TYPE_CHECKING:
    from triune.algorithms.micro_batch import MicroBatch


@brick("policy_loss")
@dataclass(frozen=True, kw_only=True)
class TOPR:
    """Imitate good sequences as they are, and push bad ones away only while the policy still makes them.

    The loss is -w A log p, where w is 1 for A > 0 and else min(1, p(sequence) / behaviour(sequence)) without gradient.
    The ratio is that of the whole sequence, the product over its tokens: what became unlikely is left alone, so that
    stale failures cannot drive log-probs to minus infinity. Positives need no correction; weighing them down would slow
    learning where it is wanted.

    On-policy the expected gradient is the policy gradient. Off-policy it is biased towards imitating what was good, by
    design; the baseline of the advantage sets how much counts as good.

    Source: TOPR, arXiv:2503.14286, section 3.

    Attributes:
        average: How tokens are averaged; the paper's log-prob is that of the sequence, the sum.
        length: Tokens to divide by, with `average: constant`.
        missing_behaviour: What to do with tokens whose behaviour log-prob is unknown: leave them out, or take their
            ratio as 1.
    """

    average: Average = "sequence_sum"
    length: Annotated[int, Field(gt=0)] | None = None
    missing_behaviour: Literal["exclude", "use_old"] = "exclude"
    needs: ClassVar[frozenset[str]] = frozenset({"advantages"})
    expected_gradient: ClassVar[str] = "policy_gradient"
    surrogate: ClassVar[str] = "stop_gradient"

    def __call__(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """Yield `policy_loss`, and the metric `taper_mean`: the mean weight where A < 0."""
        mask, advantages = batch.ratio_mask(self.missing_behaviour), batch.advantages
        log_ratio_S = batch.segment_sum(above_behaviour(batch, batch.logprobs), mask)
        taper, is_bad = batch.spread(log_ratio_S.clamp(max=0).exp()), advantages < 0
        weight = taper.where(is_bad, taper.new_ones(()))
        loss = Term("policy_loss", -weight * advantages * batch.logprobs, mask)
        return [averaged(loss, batch, self.average, self.length), metric("taper_mean", taper, mask & is_bad)]

    def check(self, where: str) -> None:
        """Raise ConfigError when `average` and `length` do not fit."""
        check_average(self.average, self.length, where)
