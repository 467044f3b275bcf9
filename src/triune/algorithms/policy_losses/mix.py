"""Reinforcement and imitation in one loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from triune.algorithms.policy_losses._mixed import Mixed
from triune.algorithms.progress import Progress
from triune.registry import brick


@brick("policy_loss", "mix")
@dataclass(frozen=True, kw_only=True)
class MixLoss(Mixed):
    """Reinforce what was sampled and imitate what an expert wrote: (1 - mu) x rl + mu x sft.

    Each part is averaged over its own tokens, so `mu` weighs the two whatever the lengths and numbers of answers; the
    shares of the batch only set how noisy each part is. Expert tokens have no behaviour log-prob and are in no ratio.

    In expectation (1 - mu) times the policy gradient plus mu times that of the expert answers' mean log-prob: as long
    as mu > 0 it is biased, by design, towards the expert.

    Source: MIX of Trinity-RFT, arXiv:2505.17826.

    Attributes:
        mu: Weight of imitation.
        rl: Loss on what the policy sampled.
        imitation: Loss on the expert's tokens.
    """

    mu: Annotated[float, Field(ge=0, le=1)] = 0.1

    def mu_at(self, progress: Progress) -> float:
        """The same in every step."""
        return self.mu
