"""Imitation that fades, of the tokens that are neither absurd nor known."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from triune.algorithms.policy_losses._mixed import Mixed
from triune.algorithms.policy_losses.sft import SFT
from triune.algorithms.progress import Progress
from triune.algorithms.terms import Term, metric
from triune.records import Source
from triune.registry import brick, brick_field

if TYPE_CHECKING:
    from triune.algorithms.micro_batch import MicroBatch


@brick("policy_loss")
@dataclass(frozen=True, kw_only=True)
class Chord(Mixed):
    """(1 - mu) x rl + mu x mean of -phi log p over expert tokens, with mu by a schedule and phi = p (1 - p).

    mu rises linearly from 0 to `peak` over `warmup_steps`, falls along half a cosine to `valley` over `decay_steps`,
    and stays there: first off-policy from the expert, then on-policy from itself. phi is a constant for the gradient:
    a token the policy finds impossible or certain hardly pulls, so what it can do already is not torn apart. Its
    expected gradient is that of p - p² / 2, not of log p.

    `imitation: {weight: one}` is CHORD-mu, whose mu falls from 0.9 to 0.05; equal `peak` and `valley` are CHORD-phi.

    Source: CHORD, arXiv:2508.11408.

    Attributes:
        peak: Weight of imitation after the warm-up.
        valley: Weight of imitation at the end.
        warmup_steps: Steps over which mu rises from 0.
        decay_steps: Steps over which it then falls.
        rl: Loss on what the policy sampled.
        imitation: Loss on the expert's tokens.
    """

    peak: Annotated[float, Field(ge=0, le=1)] = 0.5
    valley: Annotated[float, Field(ge=0, le=1)] = 0.05
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    decay_steps: Annotated[int, Field(ge=0)] = 200
    imitation: Any = brick_field("policy_loss", SFT(weight="phi", sources=(Source.EXPERT,)))

    def mu_at(self, progress: Progress) -> float:
        """Of the step that follows `progress.step` steps."""
        if progress.step < self.warmup_steps:
            return self.peak * progress.step / self.warmup_steps
        after = progress.step - self.warmup_steps
        if after >= self.decay_steps:
            return self.valley
        return self.valley + (self.peak - self.valley) * (1 + math.cos(math.pi * after / self.decay_steps)) / 2

    def __call__(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """Yield the terms of both parts, and the metric `mu`."""
        mu = batch.logprobs.new_full(batch.logprobs.shape, self.mu_at(progress))
        return [*super().__call__(batch, state, progress), metric("mu", mu, batch.action_mask)]
