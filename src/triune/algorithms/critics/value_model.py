"""A value model beside the policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from triune.algorithms.progress import Progress
from triune.algorithms.terms import Term, metric
from triune.registry import brick

if TYPE_CHECKING:
    from triune.algorithms.micro_batch import MicroBatch

_MOMENTS = ("value_error", "value_error_square", "return_square")


@brick("critic")
@dataclass(frozen=True, kw_only=True)
class ValueModel:
    """Train a second model to tell, before every token, the return that is still to come: (v - return)² / 2 per token.

    Its loss is least where v is the mean return after the prefix. `value_clip` c takes the larger of this and the same
    for v_old + clamp(v - v_old, -c, c): a value that has moved by more than c towards its return moves no further in
    this step. A return that is unknown trains nothing.

    The body starts as a copy of the policy's initial weights (with an adapter of its own where the policy has one) and
    the head at zero, so that all values start at 0. Schedule, betas, weight decay and clipping are the trainer's.

    Source: PPO, arXiv:1707.06347, eq. 9; the clip: arXiv:2005.12729, section 3.

    Attributes:
        learning_rate: Peak learning rate of the value model; usually ten times the policy's.
        warmup_steps: Steps at the start in which only the value model is trained.
        value_clip: How far a value may move within a step and still be trained; null = no bound.
        path: A model to start the body from, with the policy's vocabulary; null = the policy's own initial weights.
    """

    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    value_clip: Annotated[float, Field(gt=0)] | None = None
    path: str | None = None
    needs: ClassVar[frozenset[str]] = frozenset({"values", "returns"})
    makes_values: ClassVar[bool] = True
    expected_gradient: ClassVar[str] = "mean_return"
    variants: ClassVar[tuple[Mapping[str, Any], ...]] = ({"value_clip": 0.2},)

    def __call__(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """Yield `value_loss`, the means of values and returns, and the moments that `summarise` reads."""
        mask = batch.action_mask & ~batch.returns.isnan()
        returns = batch.returns.where(mask, 0.0)
        loss = (batch.new_values - returns).square() / 2
        terms = [metric("value_mean", batch.values, mask), metric("return_mean", returns, mask)]
        if self.value_clip is not None:
            near = batch.values + (batch.new_values - batch.values).clamp(-self.value_clip, self.value_clip)
            clipped = (near - returns).square() / 2
            terms.append(metric("value_clip_ratio", (clipped > loss).to(loss.dtype), mask))
            loss = loss.maximum(clipped)
        error, exact = returns.double() - batch.values.double(), returns.double()
        moments = zip(_MOMENTS, (error, error.square(), exact.square()), strict=True)
        return [Term("value_loss", loss, mask), *terms, *(metric(name, value, mask) for name, value in moments)]

    def summarise(self, stats: Mapping[str, float]) -> dict[str, float]:
        """An update's metrics with its moments as `explained_variance`: 1 - var(return - value) / var(return).

        1 is a perfect critic, 0 one that knows the mean only, below 0 worse than that; left out where all returns are
        equal. Of the values that began the step, so that nothing trained on these returns yet.
        """
        shown = {name: value for name, value in stats.items() if name not in _MOMENTS}
        if not all(name in stats for name in _MOMENTS):
            return shown
        error, error_square, square = (stats[name] for name in _MOMENTS)
        variance = square - stats["return_mean"] ** 2
        if variance > 1e-9 * square:
            shown["explained_variance"] = 1 - (error_square - error**2) / variance
        return shown
