"""REINFORCE on group-relative rewards, read as off-policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from triune.algorithms.policy_losses._surrogate import above_behaviour
from triune.algorithms.progress import Progress
from triune.algorithms.terms import Average, Term, averaged, check_average, metric
from triune.errors import ConfigError
from triune.registry import brick

if TYPE_CHECKING:
    from torch import Tensor

    from triune.algorithms.micro_batch import MicroBatch


@brick("policy_loss")
@dataclass(frozen=True, kw_only=True)
class REC:
    """REINFORCE with clipping: -A log p wherever the ratio is in range, and nothing elsewhere.

    With r = p / behaviour per token, in range is, by `clip`:
    `one_side`: r <= 1 + clip_high where A > 0, r >= 1 - clip_low where A < 0 (what PPO's minimum lets through).
    `two_side`: 1 - clip_low <= r <= 1 + clip_high, whatever A.
    `ring`: that, and r <= 1 - ring_low where A > 0, r >= 1 + ring_high where A < 0: what the policy does least although
    it was good, and most although it was bad, is corrected again.
    `none`: everywhere.
    The gate is a constant for the gradient. The paper's point: clipping, not importance weighting, is what keeps
    off-policy learning stable, so `importance` is off; switched on, the weight r (a constant too) makes `one_side` the
    gradient of PPO.

    On-policy the expected gradient is the policy gradient; off-policy, without importance, it is a regularised step
    for the policy that sampled, whatever that was.

    Source: REC, arXiv:2509.24203.

    Attributes:
        clip: Which ratios are in range.
        clip_low: How far below 1 the ratio may fall.
        clip_high: How far above 1 it may rise.
        ring_low: With `clip: ring`, how far below 1 it must be to be in range again where A > 0.
        ring_high: With `clip: ring`, how far above 1 where A < 0.
        importance: Whether to weigh by the ratio.
        average: How tokens are averaged.
        length: Tokens to divide by, with `average: constant`.
        missing_behaviour: What to do with tokens whose behaviour log-prob is unknown: leave them out, or take their
            ratio as 1.
    """

    clip: Literal["one_side", "two_side", "ring", "none"] = "one_side"
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    ring_low: Annotated[float, Field(gt=0, le=1)] = 0.6
    ring_high: Annotated[float, Field(gt=0)] = 2.0
    importance: bool = False
    average: Average = "token"
    length: Annotated[int, Field(gt=0)] | None = None
    missing_behaviour: Literal["exclude", "use_old"] = "exclude"
    needs: ClassVar[frozenset[str]] = frozenset({"advantages"})
    expected_gradient: ClassVar[str] = "policy_gradient"
    surrogate: ClassVar[str] = "stop_gradient"

    def __call__(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """Yield `policy_loss`, and the metrics `ratio_mean` and `clip_ratio`."""
        mask, advantages = batch.ratio_mask(self.missing_behaviour), batch.advantages
        ratio = above_behaviour(batch, batch.logprobs).exp()
        in_range = self.in_range(ratio, advantages)
        weight = (ratio if self.importance else ratio.new_ones(())).where(in_range, ratio.new_zeros(()))
        return [
            averaged(
                Term("policy_loss", -advantages * weight * batch.logprobs, mask), batch, self.average, self.length
            ),
            metric("ratio_mean", ratio, mask),
            metric("clip_ratio", (~in_range).to(ratio.dtype), mask),
        ]

    def in_range(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """bool[B, T]: which tokens have a gradient."""
        not_high, not_low = ratio <= 1 + self.clip_high, ratio >= 1 - self.clip_low
        if self.clip == "none":
            return ratio.new_ones(ratio.shape, dtype=not_low.dtype)
        if self.clip == "one_side":
            return not_high.where(advantages > 0, not_low)
        inside = not_high & not_low
        if self.clip == "two_side":
            return inside
        far_low, far_high = ratio <= 1 - self.ring_low, ratio >= 1 + self.ring_high
        return inside | far_low.where(advantages > 0, far_high)

    def check(self, where: str) -> None:
        """Raise ConfigError when `average` and `length` do not fit, or the ring has no gap."""
        check_average(self.average, self.length, where)
        for side in ("low", "high"):
            ring, clip = getattr(self, f"ring_{side}"), getattr(self, f"clip_{side}")
            if self.clip == "ring" and ring <= clip:
                found = f"found {ring} with `clip_{side}: {clip}`"
                raise ConfigError(f"{where}.ring_{side}", found, "more than that", "widen it, or write `clip: none`")
