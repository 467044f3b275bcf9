"""The policy runs away from its reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from triune.monitor.alarm import State, counted, fast_and_slow
from triune.registry import brick


@brick("alarm", "kl_growth")
@dataclass(frozen=True, kw_only=True)
class KLGrowth:
    """Goes off when `kl` is above a floor and grows faster than it used to, or is above a limit."""

    floor: float = 0.1
    """Growth below this KL (nats per token) is no fault."""

    factor: float = 2.0
    """Recent KL divided by its long average."""

    limit: float = 5.0
    """KL that is a fault however slowly it came."""

    patience: int = 5
    """Steps in a row."""

    policy: Literal["warn", "stop"] = "warn"
    """Say so, or end the run."""

    def __call__(self, metrics: Mapping[str, float], state: State) -> tuple[State, str]:
        if "kl" not in metrics:
            return state, ""
        state = fast_and_slow(metrics["kl"], state, "kl", 0.5, 0.05)
        fast, slow = state["kl.fast"], state["kl.slow"]
        is_bad = fast > self.limit or (fast > self.floor and fast > self.factor * slow)
        state = counted(is_bad, state)
        if state["bad"] < self.patience:
            return state, ""
        return state, (
            f"KL to the reference is {fast:.3f} nats per token, long average {slow:.3f}; lower "
            "trainer.learning_rate or raise algorithm.kl's weight"
        )
