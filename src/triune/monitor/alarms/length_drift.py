"""Answers become much longer or shorter than they were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from triune.monitor.alarm import State, counted
from triune.registry import brick


@brick("alarm")
@dataclass(frozen=True, kw_only=True)
class LengthDrift:
    """Goes off when `response_length` leaves a band around its mean over the first steps without a rise in reward."""

    factor: float = 3.0
    """Band: the first mean divided by this, up to the first mean times this."""

    warmup: int = 5
    """Steps that define the first mean."""

    patience: int = 5
    """Steps in a row."""

    policy: Literal["warn", "stop"] = "warn"
    """Say so, or end the run."""

    def __call__(self, metrics: Mapping[str, float], state: State) -> tuple[State, str]:
        if "response_length" not in metrics:
            return state, ""
        length, reward = metrics["response_length"], metrics.get("reward", 0.0)
        seen = state.get("seen", 0.0)
        if seen < self.warmup:
            first = {
                "length": state.get("length", 0.0) + length / self.warmup,
                "reward": state.get("reward", 0.0) + reward / self.warmup,
            }
            return {**state, **first, "seen": seen + 1}, ""
        is_outside = not state["length"] / self.factor <= length <= state["length"] * self.factor
        state = counted(is_outside and reward <= state["reward"], state)
        if state["bad"] < self.patience:
            return state, ""
        return state, (
            f"responses are {length:.0f} tokens long, {state['length']:.0f} at the start, and the reward did not rise; "
            "look at rollouts with `triune buffer show`, or add the length_penalty operator"
        )
