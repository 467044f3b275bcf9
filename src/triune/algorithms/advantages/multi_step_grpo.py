"""Group-relative advantages for rollouts of several steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from triune.algorithms.advantages._statistics import centred, standardised
from triune.algorithms.advantages._turns import steps_of, to_go
from triune.algorithms.credit import credit
from triune.records import Group
from triune.registry import brick


@brick("advantage", "multi_step_grpo")
@dataclass(frozen=True, kw_only=True)
class MultiStepGRPOAdvantage:
    """Compare the rollouts of a task, and hand the result to all their steps, or credit each step with what follows it.

    `rewards: final` gives every step of a rollout the rollout's group-relative advantage, wherever its steps are stored
    (one experience, or one per turn). `rewards: turns` normalises the rewards of all steps of the group by their common
    mean and deviation, and credits a step with the sum of its own and all later ones (the paper's process supervision):
    a step no longer answers for what came before it. What the turns do not account for is paid to the last step.

    The deviation is over rollouts with `final` and over steps with `turns`. With `turns` the subtracted mean is summed
    over what is left of the rollout, so longer rollouts subtract more: rewards that differ in length are not baselined
    exactly. A group in which nothing differs gets exactly 0.

    Source: outcome and process supervision, GRPO, arXiv:2402.03300, sections 4.1.2 and 4.1.3.

    Attributes:
        rewards: Whether the rollout's final reward is compared, or the rewards of its turns.
        scale: What to divide by: the deviation, or nothing.
        std: `sample` divides the squares by their number less one, `population` by their number.
        epsilon: Added to the deviation, in the unit of the reward.
        divide_by_steps: Whether advantages are divided by the rollout's number of steps, so that long rollouts do not
            weigh more where each step is a sequence of its own.
    """

    rewards: Literal["final", "turns"] = "final"
    scale: Literal["group", "none"] = "group"
    std: Literal["sample", "population"] = "sample"
    epsilon: float = 1e-6
    divide_by_steps: bool = False
    where: ClassVar[str] = "pipeline"
    least_group: ClassVar[int] = 2

    def __call__(self, group: Group) -> Group:
        """Credit every step."""
        members = list(group.valid_members.values())
        steps = [steps_of(rows) for rows in members]
        sizes = [max(len(of_rollout), 1) if self.divide_by_steps else 1 for of_rollout in steps]
        if self.rewards == "final":
            found = self._scaled(group.rewards.tolist())
            return credit(group, [value / size for value, size in zip(found, sizes, strict=True)])
        flat = iter(self._scaled([step.reward for of_rollout in steps for step in of_rollout]))
        records, shaped = [], credit(group, [0.0] * len(members)).valid_members.values()
        for rows, of_rollout, size in zip(shaped, steps, sizes, strict=True):
            values = to_go([next(flat) for _ in of_rollout], 1.0)
            streams = [np.zeros(len(row), np.float32) for row in rows]
            for step, value in reversed(list(zip(of_rollout, values, strict=True))):
                streams[step.row][: step.stop] = value / size
            records += [
                row.with_streams(advantages=stream * row.action_mask) for row, stream in zip(rows, streams, strict=True)
            ]
        return group.with_records(records)

    def _scaled(self, values: list[float]) -> list[float]:
        return centred(values) if self.scale == "none" else standardised(values, self.std, self.epsilon)
