"""Supervised imitation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

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
    """Raise the log-prob of every action token: the loss is -log p, in nats per token.

    Attributes:
        sources: Whose tokens to imitate; empty = everybody's.
        average: How tokens are averaged. `token` weighs long answers more, `sequence` all answers alike.
        length: Tokens to divide by, with `average: constant`.
    """

    sources: tuple[Source, ...] = ()
    average: Average = "token"
    length: Annotated[int, Field(gt=0)] | None = None
    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """Yield `policy_loss`."""
        loss = Term("policy_loss", -batch.logprobs, batch.from_sources(*self.sources))
        return [averaged(loss, batch, self.average, self.length)]

    def check(self, where: str) -> None:
        """Raise ConfigError when `average` and `length` do not fit."""
        check_average(self.average, self.length, where)
