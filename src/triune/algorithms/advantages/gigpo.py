"""Advantages of rollouts, and of steps that were taken in the same state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from triune.algorithms.advantages._statistics import centred, standardised
from triune.algorithms.advantages._turns import steps_of, to_go
from triune.algorithms.credit import credit
from triune.records import Group
from triune.registry import brick


@brick("advantage", "gigpo")
@dataclass(frozen=True, kw_only=True)
class GiGPOAdvantage:
    """Compare rollouts of a task, and inside them all steps that were taken in one state of that task.

    A = A_rollout + step_weight x A_step. A_rollout is GRPO's. For A_step every turn has a discounted return, the sum of
    discount^k x reward of the k-th turn after it; turns of the *same group* that share a `state_key` (the state they
    acted in, also when one rollout comes there twice) are compared with each other like rollouts are. A turn without a
    key, and a state that was met only once, get A_step 0. Equal keys of different tasks never meet: groups are shaped
    one by one.

    What the turns' rewards do not account for is paid to the last turn, so a rollout with a final reward alone still
    tells early from late steps by the discount. With a discount below 1 A_step follows the discounted return; either
    mean contains the rollout itself, so the expected gradient is not exactly the policy gradient.

    Source: GiGPO, arXiv:2505.10978 (its normaliser is a deviation or 1: `scale`).

    Attributes:
        step_weight: Weight of A_step.
        discount: Factor per turn.
        scale: What both levels are divided by: their deviation, or nothing.
        std: `sample` divides the squares by their number less one, `population` by their number.
        epsilon: Added to the deviation, in the unit of the reward.
    """

    step_weight: Annotated[float, Field(ge=0)] = 1.0
    discount: Annotated[float, Field(ge=0, le=1)] = 0.95
    scale: Literal["group", "none"] = "group"
    std: Literal["sample", "population"] = "sample"
    epsilon: float = 1e-6
    where: ClassVar[str] = "pipeline"
    least_group: ClassVar[int] = 2

    def __call__(self, group: Group) -> Group:
        """Credit every rollout, then every turn."""
        shaped = credit(group, self._scaled(group.rewards.tolist()))
        members = list(shaped.valid_members.values())
        steps = [(number, step) for number, rows in enumerate(members) for step in steps_of(rows)]
        returns = [value for rows in members for value in to_go([s.reward for s in steps_of(rows)], self.discount)]
        anchors: dict[str, list[int]] = {}
        for place, (_, step) in enumerate(steps):
            if step.state_key is not None:
                anchors.setdefault(step.state_key, []).append(place)
        streams = [[row.streams["advantages"].copy() for row in rows] for rows in members]
        for places in anchors.values():
            for place, value in zip(places, self._scaled([returns[place] for place in places]), strict=True):
                number, step = steps[place]
                streams[number][step.row][step.start : step.stop] += np.float32(self.step_weight * value)
        return group.with_records(
            [
                row.with_streams(advantages=stream * row.action_mask)
                for rows, of_rollout in zip(members, streams, strict=True)
                for row, stream in zip(rows, of_rollout, strict=True)
            ]
        )

    def _scaled(self, values: list[float]) -> list[float]:
        return centred(values) if self.scale == "none" else standardised(values, self.std, self.epsilon)
