"""What an alarm is, and the two averages they all look at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

Policy = Literal["warn", "stop"]
State = dict[str, float]


class Alarm(Protocol):
    """A frozen dataclass that looks at each step's merged metrics. State is passed in and returned."""

    @property
    def policy(self) -> Policy:
        """`warn`: say so and go on. `stop`: end the run at the step boundary."""
        ...

    def __call__(self, metrics: Mapping[str, float], state: State) -> tuple[State, str]:
        """The state after this step, and what is wrong ("" = nothing)."""
        ...


def fast_and_slow(value: float, state: State, name: str, fast: float, slow: float) -> State:
    """Update two exponential averages of `name`; `fast` and `slow` are the weights of the new value."""
    old_fast, old_slow = state.get(f"{name}.fast", value), state.get(f"{name}.slow", value)
    return {
        **state,
        f"{name}.fast": old_fast + fast * (value - old_fast),
        f"{name}.slow": old_slow + slow * (value - old_slow),
    }


def counted(is_bad: bool, state: State) -> State:
    """Update how many steps in a row were bad."""
    return {**state, "bad": state.get("bad", 0.0) + 1 if is_bad else 0.0}
