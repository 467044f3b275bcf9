"""Sampler and trainer disagree about log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from triune.monitor.alarm import State, counted, fast_and_slow
from triune.registry import brick


@brick("alarm")
@dataclass(frozen=True, kw_only=True)
class LogprobGap:
    """Goes off when `logprob_gap` (mean absolute difference in nats between engine and trainer) stays above a limit.

    Precision alone gives about 0.01 in bf16; more means other weights, another temperature or other tokens.
    """

    limit: float = 0.1
    """Mean absolute gap per token, nats."""

    patience: int = 3
    """Steps in a row."""

    policy: Literal["warn", "stop"] = "warn"
    """Say so, or end the run."""

    def __call__(self, metrics: Mapping[str, float], state: State) -> tuple[State, str]:
        if "logprob_gap" not in metrics:
            return state, ""
        state = fast_and_slow(metrics["logprob_gap"], state, "gap", 0.5, 0.1)
        state = counted(state["gap.fast"] > self.limit, state)
        if state["bad"] < self.patience:
            return state, ""
        return state, (
            f"sampler and trainer differ by {state['gap.fast']:.3f} nats per token, limit {self.limit}; check "
            "precision, sync.max_staleness and the model's chat template"
        )
