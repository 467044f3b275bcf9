"""An entropy bonus that works only where it is needed."""

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


@brick("entropy")
@dataclass(frozen=True, kw_only=True)
class AdaptiveTarget:
    """Hold the entropy above a target by a bonus whose coefficient moves by a step after every update.

    Below the target the coefficient rises and is applied; above it falls (not below 0, so that it answers at once when
    it is needed) and nothing is applied. Both look at the entropy of the last update, which is known when the next one
    begins: the answer lags by one update, and does not depend on how a batch was cut. The coefficient is part of the
    checkpoint. Where the bonus is applied its gradient is that of the entropy.

    Source: Skywork-OR1, arXiv:2505.22312, section 3.2.

    Attributes:
        target: Mean entropy per token to stay above, in nats.
        step: What one update adds to the coefficient, or takes from it.
        first: The coefficient of the first update.
    """

    target: Annotated[float, Field(gt=0)] = 0.2
    step: Annotated[float, Field(gt=0)] = 0.005
    first: Annotated[float, Field(ge=0)] = 0.0
    needs: ClassVar[frozenset[str]] = frozenset({"entropy"})
    expected_gradient: ClassVar[str] = "entropy"
    variants: ClassVar[tuple[Mapping[str, Any], ...]] = ({"first": 0.01},)

    def __call__(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """Yield `entropy`, and the metric `entropy_coefficient` that is applied to it."""
        value, mask = batch.entropy, batch.action_mask
        applied = state["coefficient"] if state["is_below"] else 0.0
        shown = value.detach().new_full(mask.shape, applied)
        return [Term("entropy", value, mask, weight=-applied), metric("entropy_coefficient", shown, mask)]

    def state0(self) -> dict[str, Any]:
        """The first coefficient, applied."""
        return {"coefficient": self.first, "is_below": True}

    def update(self, state: Mapping[str, Any], stats: Mapping[str, float]) -> dict[str, Any]:
        """Move the coefficient by one step."""
        if "entropy" not in stats:
            return dict(state)
        is_below = stats["entropy"] < self.target
        moved = state["coefficient"] + (self.step if is_below else -self.step)
        return {"coefficient": max(moved, 0.0), "is_below": is_below}
