"""PPO without the updates that collapse the entropy: a covariance clip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from triune.algorithms.policy_losses._covariance import covariance, means, measured
from triune.algorithms.policy_losses._surrogate import clipped
from triune.algorithms.progress import Progress
from triune.algorithms.terms import Average, Term, averaged, check_average, metric
from triune.errors import ConfigError
from triune.registry import brick

if TYPE_CHECKING:
    from triune.algorithms.micro_batch import MicroBatch


@brick("policy_loss")
@dataclass(frozen=True, kw_only=True)
class ClipCov:
    """PPO's clip, with the gradient taken from a few tokens whose advantage and log-prob are high together.

    The entropy falls by the covariance of advantage and log-prob, most of it from very few tokens. The paper draws a
    share `share` of all tokens among those with covariance in (covariance_low, covariance_high) that PPO did not clip,
    and detaches them. Drawing from a micro-batch would depend on how it was cut; here every eligible token keeps the
    part of its gradient that it has in expectation over the draw: 1 - share / eligible, where `eligible` is the share
    of such tokens in the last update (at least 0). The means of the covariance are the last update's as well. Both are
    kept in the state: the first update is PPO's, and so is the second, which measures `eligible`.

    On-policy the expected gradient is the policy gradient without that part of a few tokens: biased, by design, and
    the policy gradient until something is eligible.

    Source: Clip-Cov, arXiv:2505.22617, section 4.2.

    Attributes:
        clip_low: How far below 1 the ratio may fall with gradient.
        clip_high: How far above 1 it may rise.
        share: Share of all tokens whose gradient is taken.
        covariance_low: Lower bound of the covariance of such tokens.
        covariance_high: Upper bound.
        average: How tokens are averaged.
        length: Tokens to divide by, with `average: constant`.
        missing_behaviour: What to do with tokens whose behaviour log-prob is unknown: leave them out, or use the old
            policy's.
    """

    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    share: Annotated[float, Field(gt=0, lt=1)] = 2e-4
    covariance_low: float = 1.0
    covariance_high: float = 5.0
    average: Average = "token"
    length: Annotated[int, Field(gt=0)] | None = None
    missing_behaviour: Literal["exclude", "use_old"] = "exclude"
    needs: ClassVar[frozenset[str]] = frozenset({"advantages"})
    expected_gradient: ClassVar[str] = "policy_gradient"
    off_policy: ClassVar[str] = "inside_clip"

    def __call__(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """Yield `policy_loss`, and metrics: `ratio_mean`, `clip_ratio`, `eligible_ratio` and the means."""
        mask = batch.ratio_mask(self.missing_behaviour)
        ratio = (batch.logprobs - batch.old_logprobs).exp()
        loss, is_clipped = clipped(ratio, batch.advantages, self.clip_low, self.clip_high)
        shown = [metric("ratio_mean", ratio, mask), metric("clip_ratio", is_clipped.to(ratio.dtype), mask)]
        found = covariance(batch, state)
        if found is not None:
            eligible = (found > self.covariance_low) & (found < self.covariance_high) & ~is_clipped
            loss = (loss * self.kept(state)).where(eligible, loss)
            shown.append(metric("eligible_ratio", eligible.to(ratio.dtype), mask))
        loss = averaged(Term("policy_loss", loss, mask), batch, self.average, self.length)
        return [loss, *shown, *means(batch, mask)]

    def kept(self, state: Mapping[str, Any]) -> float:
        """The part of its gradient that an eligible token keeps."""
        if state["eligible"] is None:
            return 1.0
        return max(1 - self.share / state["eligible"], 0.0) if state["eligible"] else 0.0

    def state0(self) -> dict[str, Any]:
        """Nothing is known."""
        return {"mean_advantage": None, "mean_logprob": None, "eligible": None}

    def update(self, state: Mapping[str, Any], stats: Mapping[str, float]) -> dict[str, Any]:
        """What the update measured."""
        return {**measured(state, stats), "eligible": stats.get("eligible_ratio", state["eligible"])}

    def check(self, where: str) -> None:
        """Raise ConfigError when `average` and `length` do not fit, or no covariance is in between."""
        check_average(self.average, self.length, where)
        if self.covariance_low >= self.covariance_high:
            found = f"found {self.covariance_low} with `covariance_high: {self.covariance_high}`"
            raise ConfigError(f"{where}.covariance_low", found, "less than that", "lower it")
