"""Identity preference optimisation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from triune.algorithms.policy_losses._preference import comparisons, margins
from triune.algorithms.progress import Progress
from triune.algorithms.terms import Term
from triune.registry import brick

if TYPE_CHECKING:
    from triune.algorithms.micro_batch import MicroBatch


@brick("policy_loss")
@dataclass(frozen=True, kw_only=True)
class IPO:
    """Bring the gap between two answers to a fixed size, and not beyond it.

    With h = log(policy / reference) of the chosen answer minus that of the rejected one, the loss of a pair is
    (h - (1/2 + margin) / beta)². DPO drives h to infinity where a pair is never labelled the other way; this square
    does not. A row's margin is in units of reward (beta x h), as in DPO; the paper has none. At the reference the
    expected gradient is -1 / beta times that of log p(chosen) - log p(rejected).

    The paper's log-ratios are those of whole answers; implementations also divide them by the answers' lengths
    (`length: mean`), which lets short and long answers reach the same target with the same change per token.

    Source: arXiv:2310.12036, eq. 17.

    Attributes:
        beta: The paper's tau: the target of h is 1 / (2 beta).
        length: Log-ratios are summed or averaged over the tokens of an answer.
    """

    beta: Annotated[float, Field(gt=0)] = 0.1
    length: Literal["sum", "mean"] = "sum"
    needs: ClassVar[frozenset[str]] = frozenset({"ref_logprobs"})
    unit: ClassVar[str] = "pair"
    reads: ClassVar[str] = "pairs"
    expected_gradient: ClassVar[str] = "improves_likelihood"

    def __call__(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """Yield `policy_loss`, and the metrics of `comparisons`."""
        over = batch.segment_sum if self.length == "sum" else batch.segment_mean
        chosen, rejected = batch.halves(over(batch.logprobs - batch.ref_logprobs, batch.action_mask))
        loss = (chosen - rejected - (0.5 + margins(batch)) / self.beta).square()
        return comparisons(batch, loss, self.beta * chosen, self.beta * rejected)
