"""The policy gradient, held back where it collapses the entropy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from triune.algorithms.policy_losses._covariance import covariance, means, measured
from triune.algorithms.progress import Progress
from triune.algorithms.terms import Average, Term, averaged, check_average, metric
from triune.registry import brick

if TYPE_CHECKING:
    from triune.algorithms.micro_batch import MicroBatch


@brick("policy_loss")
@dataclass(frozen=True, kw_only=True)
class KLCov:
    """No clip; the few tokens of largest covariance of advantage and log-prob are held at the old policy.

    The loss is -r A with r = exp(new - old), plus `coefficient` x |new - old| where the covariance is above a bound.
    The paper takes the `share` of tokens with the largest covariance of a batch, which no micro-batch knows. Here the
    bound is kept in the state: three deviations when the covariance was first measured, and after every update
    multiplied by exp(0.1 (found / share - 1)), so that the selected share settles at `share`. Nothing depends on
    micro-batches or ranks; the selection lags by one update, and the first two updates select nothing.

    On-policy the expected gradient is the policy gradient (the penalty has none at r = 1); in later updates of a step
    it is biased on the selected tokens, by design, and without bound on r elsewhere.

    Source: KL-Cov, arXiv:2505.22617, section 4.2, with the absolute log-ratio of the authors' code as its KL.

    Attributes:
        share: Share of all tokens that are held.
        coefficient: Weight of their penalty.
        average: How tokens are averaged.
        length: Tokens to divide by, with `average: constant`.
        missing_behaviour: What to do with tokens whose behaviour log-prob is unknown: leave them out, or use the old
            policy's.
    """

    share: Annotated[float, Field(gt=0, lt=1)] = 2e-3
    coefficient: Annotated[float, Field(ge=0)] = 1.0
    average: Average = "token"
    length: Annotated[int, Field(gt=0)] | None = None
    missing_behaviour: Literal["exclude", "use_old"] = "exclude"
    needs: ClassVar[frozenset[str]] = frozenset({"advantages"})
    expected_gradient: ClassVar[str] = "policy_gradient"

    def __call__(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """Yield `policy_loss`, and metrics: `ratio_mean`, `held_ratio`, `covariance_square` and the means."""
        mask = batch.ratio_mask(self.missing_behaviour)
        log_ratio = batch.logprobs - batch.old_logprobs
        loss, shown = -batch.advantages * log_ratio.exp(), [metric("ratio_mean", log_ratio.exp(), mask)]
        found = covariance(batch, state)
        if found is not None:
            shown.append(metric("covariance_square", found.square(), mask))
        if found is not None and state["bound"] is not None:
            held = (found > state["bound"]).to(loss.dtype)
            loss = loss + self.coefficient * held * log_ratio.abs()
            shown.append(metric("held_ratio", held, mask))
        loss = averaged(Term("policy_loss", loss, mask), batch, self.average, self.length)
        return [loss, *shown, *means(batch, mask)]

    def state0(self) -> dict[str, Any]:
        """Nothing is known."""
        return {"mean_advantage": None, "mean_logprob": None, "bound": None}

    def update(self, state: Mapping[str, Any], stats: Mapping[str, float]) -> dict[str, Any]:
        """Means of the update, and the bound moved towards the wanted share."""
        bound = state["bound"]
        if "held_ratio" in stats:
            bound *= math.exp(0.1 * min(stats["held_ratio"] / self.share - 1, 10.0))
        elif stats.get("covariance_square", 0.0) > 0:
            bound = 3 * math.sqrt(stats["covariance_square"])
        return {**measured(state, stats), "bound": bound}

    def check(self, where: str) -> None:
        """Raise ConfigError when `average` and `length` do not fit."""
        check_average(self.average, self.length, where)
