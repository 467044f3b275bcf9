"""A reward for staying undecided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from triune.algorithms.progress import Progress
from triune.algorithms.terms import Term
from triune.registry import brick

if TYPE_CHECKING:
    from triune.algorithms.micro_batch import MicroBatch


@brick("entropy")
@dataclass(frozen=True, kw_only=True)
class Bonus:
    """Raise the entropy of the distribution each token was drawn from, by a constant coefficient.

    The entropy is that of the whole distribution at the sampling temperature, so the forward pass must keep the logits
    of all action tokens; `none` spares that.

    Source: Williams and Peng 1991, "Function optimization using connectionist reinforcement learning algorithms".

    Attributes:
        coefficient: Weight per nat; below 0 it sharpens the policy.
    """

    coefficient: float = 0.001
    needs: ClassVar[frozenset[str]] = frozenset({"entropy"})
    expected_gradient: ClassVar[str] = "entropy"

    def __call__(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """Yield `entropy`, with a negative weight because a loss is minimised."""
        return [Term("entropy", batch.entropy, batch.action_mask, weight=-self.coefficient)]
