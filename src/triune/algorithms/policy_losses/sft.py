"""Supervised imitation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from triune.algorithms.progress import Progress
from triune.algorithms.terms import Average, Term, averaged, check_average
from triune.records import Source
from triune.registry import brick

if TYPE_CHECKING:
    from triune.algorithms.micro_batch import MicroBatch


@brick("policy_loss")
@dataclass(frozen=True, kw_only=True)
class SFT:
    """Raise the log-prob of every action token: the loss is -w log p, in nats per token, with w = 1 by default.

    A weight w that depends on the policy is a constant for the gradient. `probability` takes w = p: as a policy
    gradient, imitation has the importance weight 1 / p, under which a few tokens the model finds absurd dominate; w = p
    takes it out, and what is followed is the gradient of p itself. `phi` takes w = p (1 - p), the gradient of
    p - p² / 2: tokens that are absurd *or* known already hardly count. With either, the loss shown is the weighted one.

    Source: `probability`: dynamic fine-tuning, arXiv:2508.05629; `phi`: CHORD, arXiv:2508.11408.

    Attributes:
        weight: What each token's log-prob is multiplied by.
        sources: Whose tokens to imitate; empty = everybody's.
        average: How tokens are averaged. `token` weighs long answers more, `sequence` all answers alike.
        length: Tokens to divide by, with `average: constant`.
    """

    weight: Literal["one", "probability", "phi"] = "one"
    sources: tuple[Source, ...] = ()
    average: Average = "token"
    length: Annotated[int, Field(gt=0)] | None = None
    needs: ClassVar[frozenset[str]] = frozenset()
    variants: ClassVar[tuple[Mapping[str, Any], ...]] = ({"sources": ["expert"]},)

    @property
    def expected_gradient(self) -> str:
        """That of the data's mean log-prob; a weight changes which tokens move it."""
        return "imitation" if self.weight == "one" else "improves_likelihood"

    @property
    def surrogate(self) -> str:
        """No gradient goes through a weight."""
        return "" if self.weight == "one" else "stop_gradient"

    def __call__(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """Yield `policy_loss`."""
        value = -batch.logprobs
        if self.weight != "one":
            p = batch.logprobs.detach().exp()
            value = value * (p if self.weight == "probability" else p * (1 - p))
        loss = Term("policy_loss", value, batch.from_sources(*self.sources))
        return [averaged(loss, batch, self.average, self.length)]

    def check(self, where: str) -> None:
        """Raise ConfigError when `average` and `length` do not fit."""
        check_average(self.average, self.length, where)
