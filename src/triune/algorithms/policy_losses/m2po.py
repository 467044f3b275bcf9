"""A trust region on the second moment of the log-ratio."""

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


@brick("policy_loss", "m2po")
@dataclass(frozen=True, kw_only=True)
class M2PO:
    """Leave out just enough outlying tokens to keep the mean squared log-ratio small; nothing else is clipped.

    With r = p / behaviour the loss is -r A, and 0 for masked tokens, which stay in the count. Only tokens that PPO
    could clip are in the trust region: A > 0 with r > 1, A < 0 with r < 1. The paper sorts those of a whole batch and
    drops the largest (log r)² until the mean of the rest is at most `threshold`, which is the same as one cut on
    (log r)². That cut depends on all new log-probs of an update, which no micro-batch knows: here it is kept in the
    state and corrected after every update from sums over the whole update. It is halved while the mean below it is too
    large and doubled while the mean below twice of it is still small enough. So the result does not depend on
    micro-batches or ranks, the constraint holds up to a factor of 2 in the cut, and it lags by one update. The cut
    stays between `threshold`, where the constraint always holds, and 256 times that.

    On-policy the expected gradient is the policy gradient; off-policy it is, given the prefix, on the tokens kept.

    Source: M2PO, arXiv:2510.01161, algorithm 1 and eq. 5.

    Attributes:
        threshold: Largest mean of (log r)² over the tokens of the trust region.
        average: How tokens are averaged.
        length: Tokens to divide by, with `average: constant`.
        missing_behaviour: What to do with tokens whose behaviour log-prob is unknown: leave them out, or take their
            ratio as 1.
    """

    threshold: Annotated[float, Field(gt=0)] = 0.04
    average: Average = "token"
    length: Annotated[int, Field(gt=0)] | None = None
    missing_behaviour: Literal["exclude", "use_old"] = "exclude"
    needs: ClassVar[frozenset[str]] = frozenset({"advantages"})
    expected_gradient: ClassVar[str] = "policy_gradient"
    off_policy: ClassVar[str] = "inside_clip"

    def __call__(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """Yield `policy_loss`, and metrics: `ratio_mean`, `clip_ratio` (masked), `second_moment` (of all tokens).

        `excess` and `excess_double` sum (log r)² - threshold over the tokens of the trust region below the cut and
        below twice of it, per token: above 0 where their second moment is too large.
        """
        mask, advantages = batch.ratio_mask(self.missing_behaviour), batch.advantages
        log_ratio = above_behaviour(batch, batch.logprobs)
        square, in_region = log_ratio.square(), advantages * log_ratio > 0
        is_masked = in_region & (square > state["cut"])
        ratio = (batch.logprobs - batch.logprobs.detach() + log_ratio).exp()
        loss = Term("policy_loss", (-advantages * ratio).where(~is_masked, ratio.new_zeros(())), mask)
        excess = {
            name: (square - self.threshold) * (in_region & (square <= factor * state["cut"]))
            for name, factor in (("excess", 1.0), ("excess_double", 2.0))
        }
        shown = {"ratio_mean": ratio, "clip_ratio": is_masked.to(ratio.dtype), "second_moment": square, **excess}
        found = [metric(name, value, mask) for name, value in shown.items()]
        return [averaged(loss, batch, self.average, self.length), *found]

    def state0(self) -> dict[str, Any]:
        """A cut that masks ratios above e^0.8, for the default threshold."""
        return {"cut": 16 * self.threshold}

    def update(self, state: Mapping[str, Any], stats: Mapping[str, float]) -> dict[str, Any]:
        """The largest of twice the cut, the cut and half of it that keeps the second moment small enough."""
        if "excess" not in stats:
            return dict(state)
        factor = 2.0 if stats["excess_double"] <= 0 else 1.0 if stats["excess"] <= 0 else 0.5
        return {"cut": min(max(state["cut"] * factor, self.threshold), 256 * self.threshold)}

    def check(self, where: str) -> None:
        """Raise ConfigError when `average` and `length` do not fit."""
        check_average(self.average, self.length, where)
