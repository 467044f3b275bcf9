"""No entropy term."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from triune.algorithms.progress import Progress
from triune.algorithms.terms import Term
from triune.registry import brick

if TYPE_CHECKING:
    from triune.algorithms.micro_batch import MicroBatch


@brick("entropy", "none")
@dataclass(frozen=True, kw_only=True)
class NoEntropy:
    """Yield nothing; the metric `entropy` is then estimated from the log-probs of the sampled tokens, at no cost."""

    expected_gradient: ClassVar[str] = "nothing"

    def __call__(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """Yield nothing."""
        return []
