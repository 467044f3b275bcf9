"""The policy gradient itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from triune.algorithms.progress import Progress
from triune.algorithms.terms import Average, Term, averaged, check_average
from triune.registry import brick

if TYPE_CHECKING:
    from triune.algorithms.micro_batch import MicroBatch


@brick("policy_loss")
@dataclass(frozen=True, kw_only=True)
class Reinforce:
    """Raise the log-prob of each token in proportion to its advantage: the loss is -A log p.

    No ratio and no clip: unbiased on fresh samples with one update per step, biased on stale ones, which `ppo_clip`
    corrects. Needs no behaviour log-probs, so it takes tokens of any source that have an advantage.

    Source: Williams 1992, "Simple statistical gradient-following algorithms".

    Attributes:
        average: How tokens are averaged. `sequence_sum` is the textbook's sum over the steps of an episode.
        length: Tokens to divide by, with `average: constant`.
    """

    average: Average = "token"
    length: Annotated[int, Field(gt=0)] | None = None
    needs: ClassVar[frozenset[str]] = frozenset({"advantages"})
    expected_gradient: ClassVar[str] = "policy_gradient"

    def __call__(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """Yield `policy_loss`."""
        loss = Term("policy_loss", -batch.advantages * batch.logprobs, batch.action_mask)
        return [averaged(loss, batch, self.average, self.length)]

    def check(self, where: str) -> None:
        """Raise ConfigError when `average` and `length` do not fit."""
        check_average(self.average, self.length, where)
