"""Terms: what a loss is made of, and the ways to average one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from triune.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from triune.algorithms.micro_batch import MicroBatch

Average = Literal["token", "sequence", "sequence_sum", "constant"]
"""token: mean over all tokens of the update. sequence: mean over sequences of their token mean. sequence_sum: mean over
sequences of their token sum. constant: token sum over `length` times the number of sequences (Dr. GRPO)."""


@dataclass(frozen=True)
class Constant:
    """A unit: every sequence with a token in the mask counts as `tokens` tokens, however long it is."""

    tokens: float


Unit = Literal["token", "sequence", "rollout", "pair", "sum"] | Constant
"""What a term is averaged over; `sum` divides by 1 and is meant for metrics."""


@dataclass(frozen=True, eq=False)
class Term:
    """One summand of a loss: `weight x sum(value x mask) / count`, where `count` is over one update and all ranks.

    The mask may depend on the batch only, never on the new log-probs (a gate on those belongs into the value): every
    count is known before the first backward pass. A term of weight 0 is a metric and carries no gradient.

    Attributes:
        name: Name of the metric that shows the unweighted mean; unique within an algorithm.
        value: [B, T] per token, [S] per sequence or [P] per pair, minimised.
        mask: bool, same shape.
        weight: Factor in the total; never enters the metric.
        per: The unit that is counted.
    """

    name: str
    value: Tensor
    mask: Tensor
    weight: float = 1.0
    per: Unit = "token"


def metric(name: str, value: Tensor, mask: Tensor, per: Unit = "token") -> Term:
    """A number to watch: averaged exactly like a term, without weight and gradient."""
    return Term(name, value.detach(), mask, weight=0.0, per=per)


def averaged(term: Term, batch: MicroBatch, average: Average, length: int | None = None) -> Term:
    """Turn a term per token into one that is averaged as a brick's `average` field says."""
    if average == "sequence":
        value, mask = batch.segment_mean(term.value, term.mask), batch.segment_any(term.mask)
        return replace(term, value=value, mask=mask, per="sequence")
    if average == "sequence_sum":
        return replace(term, per="sequence")
    if average == "constant":
        assert length is not None, "checked by check_average"
        return replace(term, per=Constant(length))
    return replace(term, per="token")


def check_average(average: Average, length: int | None, where: str) -> None:
    """Raise ConfigError when `average` and `length` do not fit together."""
    if average == "constant" and not length:
        raise ConfigError(
            f"{where}.length",
            f"found {length}",
            "tokens to divide by",
            "write the longest response, e.g. `length: 256`",
        )
    if average != "constant" and length is not None:
        raise ConfigError(
            f"{where}.length",
            f"found {length} with `average: {average}`",
            "",
            "write `length: null`, or `average: constant`",
        )
