"""Direct preference optimisation."""

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


@brick("policy_loss")
@dataclass(frozen=True, kw_only=True)
class DPO:
    """Make the chosen answer likelier than the rejected one, measured against the reference.

    With the implicit reward r = beta x log(policy / reference) of a whole answer (a *sum* over its tokens) and
    d = r(chosen) - r(rejected) - margin, the loss of a pair is -log sigmoid(d). Its gradient is sigmoid(-d) times that
    of -d: pairs that are right already hardly count. At the reference the loss is log 2. The margin of a row asks for a
    larger gap where one answer is much better (ODPO). Label smoothing assumes that this share of the labels is flipped
    (conservative DPO); the loss then has its minimum at a finite d.

    Both answers may become less likely while d grows: watch `chosen_reward`.

    Source: arXiv:2305.18290, eq. 7; margin: ODPO, arXiv:2402.10571.

    Attributes:
        beta: Reward per nat of log-ratio; smaller lets the policy go further from the reference.
        label_smoothing: Share of labels assumed to be wrong, below one half.
    """

    beta: Annotated[float, Field(gt=0)] = 0.1
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    needs: ClassVar[frozenset[str]] = frozenset({"ref_logprobs"})
    unit: ClassVar[str] = "pair"
    reads: ClassVar[str] = "pairs"
    expected_gradient: ClassVar[str] = "bradley_terry"

    def __call__(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """Yield `policy_loss`, and the metrics of `comparisons`."""
        rewards = self.beta * batch.segment_sum(batch.logprobs - batch.ref_logprobs, batch.action_mask)
        chosen, rejected = batch.halves(rewards)
        gap = chosen - rejected - margins(batch)
        loss = (1 - self.label_smoothing) * softplus(-gap) + self.label_smoothing * softplus(gap)
        return comparisons(batch, loss, chosen, rejected)
