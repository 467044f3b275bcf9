"""The policy stopped exploring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from triune.monitor.alarm import State, counted
from triune.registry import brick


@brick("alarm")
@dataclass(frozen=True, kw_only=True)
class EntropyCollapse:
    """Goes off when `entropy` stays below a floor while the reward can still rise.

    Low entropy on a solved task is the goal, so steps whose reward is at least `solved` do not count.
    """

    floor: float = 0.01
    """Mean entropy per token, nats."""

    solved: float = 0.9
    """Reward from which low entropy is no fault."""

    patience: int = 5
    """Steps in a row."""

    policy: Literal["warn", "stop"] = "warn"
    """Say so, or end the run."""

    def __call__(self, metrics: Mapping[str, float], state: State) -> tuple[State, str]:
        if "entropy" not in metrics:
            return state, ""
        is_bad = metrics["entropy"] < self.floor and metrics.get("reward", 0.0) < self.solved
        state = counted(is_bad, state)
        if state["bad"] < self.patience:
            return state, ""
        return state, (
            f"entropy {metrics['entropy']:.4f} below {self.floor} for {state['bad']:.0f} steps; raise "
            "algorithm.entropy's weight, clip_high or explorer.temperature"
        )
