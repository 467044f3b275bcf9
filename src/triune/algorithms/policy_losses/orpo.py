"""Odds-ratio preference optimisation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from triune.algorithms.policy_losses._preference import comparisons, margins, softplus
from triune.algorithms.progress import Progress
from triune.algorithms.terms import Term, metric
from triune.registry import brick

if TYPE_CHECKING:
    from torch import Tensor

    from triune.algorithms.micro_batch import MicroBatch

SUREST = -1e-6
"""Mean log-prob from which on an answer counts as certain: its odds would be infinite."""


@brick("policy_loss")
@dataclass(frozen=True, kw_only=True)
class ORPO:
    """Imitate the chosen answer and raise its odds over the rejected one's: fine-tuning and preference in one stage.

    With P the geometric mean of an answer's token probabilities (|y| counts the trained tokens) and odds = P / (1 - P),
    the loss of a pair is -log P(chosen) - coefficient x log sigmoid(log odds(chosen) - log odds(rejected) - margin).
    No reference is needed. The rewards shown are coefficient x log P. A row's margin is ours; the paper has none. The
    expected gradient is that of the chosen answers' cross-entropy plus a smaller one that vanishes as the odds part.

    Source: arXiv:2403.07691, eq. 6 and 7.

    Attributes:
        coefficient: The paper's lambda: weight of the odds ratio beside the imitation.
    """

    coefficient: Annotated[float, Field(ge=0)] = 0.1
    needs: ClassVar[frozenset[str]] = frozenset()
    unit: ClassVar[str] = "pair"
    reads: ClassVar[str] = "pairs"
    expected_gradient: ClassVar[str] = "improves_likelihood"

    def __call__(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """Yield `policy_loss`, the metric `log_odds_ratio`, and those of `comparisons`."""
        chosen, rejected = batch.halves(batch.segment_mean(batch.logprobs, batch.action_mask))
        ratio = log_odds(chosen) - log_odds(rejected)
        loss = -chosen + self.coefficient * softplus(margins(batch) - ratio)
        terms = comparisons(batch, loss, self.coefficient * chosen, self.coefficient * rejected)
        return [*terms, metric("log_odds_ratio", ratio, terms[0].mask, per="pair")]


def log_odds(mean_logprob: Tensor) -> Tensor:
    """log(P / (1 - P)) from log P."""
    return mean_logprob - (-mean_logprob.clamp(max=SUREST).expm1()).log()
