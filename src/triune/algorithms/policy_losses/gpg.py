"""The group policy gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from triune.algorithms.policy_losses._surrogate import has_advantage
from triune.algorithms.progress import Progress
from triune.algorithms.terms import Average, Term, averaged, check_average, metric
from triune.registry import brick

if TYPE_CHECKING:
    from triune.algorithms.micro_batch import MicroBatch


@brick("policy_loss")
@dataclass(frozen=True, kw_only=True)
class GPG:
    """The policy gradient itself, averaged over the tokens that have an advantage.

    The loss is -A log p. Groups whose rewards are all equal have A = 0 everywhere and no gradient; averaging over their
    tokens too would shrink the gradient of the others, the more the easier (or harder) the tasks. The paper multiplies
    by B / (B - M) for M samples of such groups out of B; leaving their tokens out of the count is the same for answers
    of equal length, and exact for all others with `average: sequence`. A rollout exactly at its group's mean has A = 0
    as well and is not counted either.

    No ratio and no clip: on-policy the expected gradient is the policy gradient of the tasks that are mixed; for one
    update per step on fresh samples.

    Source: GPG, arXiv:2504.02546, section 3.

    Attributes:
        average: How tokens are averaged.
        length: Tokens to divide by, with `average: constant`.
        count_flat: Whether tokens without advantage are counted, as `reinforce` does.
    """

    average: Average = "token"
    length: Annotated[int, Field(gt=0)] | None = None
    count_flat: bool = False
    needs: ClassVar[frozenset[str]] = frozenset({"advantages"})
    expected_gradient: ClassVar[str] = "policy_gradient"

    def __call__(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """Yield `policy_loss`, and the metric `flat_ratio`: the share of tokens without advantage."""
        advantages, mask = batch.advantages, batch.action_mask
        is_flat = ~has_advantage(batch)
        counted = mask if self.count_flat else mask & ~is_flat
        loss = Term("policy_loss", -advantages * batch.logprobs, counted)
        flat = metric("flat_ratio", is_flat.to(advantages.dtype), mask)
        return [averaged(loss, batch, self.average, self.length), flat]

    def check(self, where: str) -> None:
        """Raise ConfigError when `average` and `length` do not fit."""
        check_average(self.average, self.length, where)
