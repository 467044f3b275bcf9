"""No KL term."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from triune.algorithms.progress import Progress
from triune.algorithms.terms import Term
from triune.registry import brick

if TYPE_CHECKING:
    from triune.algorithms.micro_batch import MicroBatch


@brick("kl", "none")
@dataclass(frozen=True, kw_only=True)
class NoKL:
    """Yield nothing; no reference model is loaded."""

    expected_gradient: ClassVar[str] = "nothing"

    def __call__(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """Yield nothing."""
        return []
