"""PPO's clip on the log-ratio."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from triune.algorithms.progress import Progress
from triune.algorithms.terms import Average, Term, averaged, check_average, metric
from triune.registry import brick

if TYPE_CHECKING:
    from triune.algorithms.micro_batch import MicroBatch


@brick("policy_loss")
@dataclass(frozen=True, kw_only=True)
class SPPO:
    """Follow the advantage times the *log*-ratio, until the ratio leaves [1 / (1 + clip), 1 + clip].

    The loss is -A log clip(p / old, 1 / (1 + clip), 1 + clip): softmax PPO, the surrogate of mirror ascent on the
    logits. Unlike PPO every token inside has the weight of the plain policy gradient (no ratio), and outside none has
    any, whichever sign A has: also a step back towards the old policy is cut off.

    On-policy the expected gradient is the policy gradient; off-policy it is that of REINFORCE on the tokens inside,
    which is biased.

    Source: sPPO, arXiv:2108.05828 (with a softmax representation).

    Attributes:
        clip: Bound on the ratio and on its inverse, minus 1.
        average: How tokens are averaged.
        length: Tokens to divide by, with `average: constant`.
        missing_behaviour: What to do with tokens whose behaviour log-prob is unknown: leave them out, or use the old
            policy's.
    """

    clip: Annotated[float, Field(gt=0)] = 0.3
    average: Average = "token"
    length: Annotated[int, Field(gt=0)] | None = None
    missing_behaviour: Literal["exclude", "use_old"] = "exclude"
    needs: ClassVar[frozenset[str]] = frozenset({"advantages"})
    expected_gradient: ClassVar[str] = "policy_gradient"

    def __call__(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """Yield `policy_loss`, and the metrics `ratio_mean` and `clip_ratio`."""
        mask, bound = batch.ratio_mask(self.missing_behaviour), math.log1p(self.clip)
        log_ratio = batch.logprobs - batch.old_logprobs
        loss = Term("policy_loss", -batch.advantages * log_ratio.clamp(-bound, bound), mask)
        return [
            averaged(loss, batch, self.average, self.length),
            metric("ratio_mean", log_ratio.exp(), mask),
            metric("clip_ratio", (log_ratio.abs() > bound).to(log_ratio.dtype), mask),
        ]

    def check(self, where: str) -> None:
        """Raise ConfigError when `average` and `length` do not fit."""
        check_average(self.average, self.length, where)
