"""Simple preference optimisation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from triune.algorithms.policy_losses._preference import comparisons, margins, softplus
from triune.algorithms.progress import Progress
from triune.algorithms.terms import Term
from triune.registry import brick

if TYPE_CHECKING:
    from triune.algorithms.micro_batch import MicroBatch


@brick("policy_loss", "simpo")
@dataclass(frozen=True, kw_only=True)
class SimPO:
    """Make the chosen answer likelier per token than the rejected one, by a margin, without a reference.

    The implicit reward is beta / |y| x log p(y), |y| counting the trained tokens: exactly what likelihood-guided
    generation ranks by, so long answers gain nothing by their length. The loss of a pair is
    -log sigmoid(r(chosen) - r(rejected) - gamma - margin). Nothing holds the policy near where it began but a small
    learning rate. Its expected gradient is sigmoid(-d) beta times that of the difference of the mean log-probs per
    token, with d what stands inside the sigmoid: pairs that are right by far hardly count.

    Source: arXiv:2405.14734, eq. 6.

    Attributes:
        beta: Reward per nat of mean log-prob; the paper uses 2 to 10.
        gamma: Least gap of rewards aimed at; the paper sets it to about half of beta or less.
    """

    beta: Annotated[float, Field(gt=0)] = 2.0
    gamma: Annotated[float, Field(ge=0)] = 1.0
    needs: ClassVar[frozenset[str]] = frozenset()
    unit: ClassVar[str] = "pair"
    reads: ClassVar[str] = "pairs"
    expected_gradient: ClassVar[str] = "improves_likelihood"

    def __call__(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """Yield `policy_loss`, and the metrics of `comparisons`."""
        chosen, rejected = batch.halves(self.beta * batch.segment_mean(batch.logprobs, batch.action_mask))
        loss = softplus(rejected - chosen + self.gamma + margins(batch))
        return comparisons(batch, loss, chosen, rejected)
