"""A mathematical question whose answer is verified."""

from __future__ import annotations

from dataclasses import dataclass

from triune.explorer.workflows.single_turn import SingleTurn
from triune.ports import RewardFn
from triune.registry import brick, build


@brick("workflow")
@dataclass(frozen=True, kw_only=True)
class Math(SingleTurn):
    """Ask for a solution whose final answer stands in a box; scored by `math_verify` unless another reward is named.

    Attributes:
        answer_key: Field of the task's data with the reference, for the default reward.
    """

    system: str | None = "Reason step by step and put your final answer within \\boxed{}."
    answer_key: str = "answer"

    def make_reward(self) -> RewardFn:
        """The reward where the task set names none."""
        return build("reward", {"use": "math_verify", "key": self.answer_key}, "tasks.reward")
