"""The model calls of a rollout as steps of an episode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from triune.records import Experience


@dataclass(frozen=True)
class Step:
    """One model call: tokens [start, stop) of the rollout's experience number `row`, and what it was paid."""

    row: int
    start: int
    stop: int
    reward: float
    state_key: str | None


def steps_of(rows: Sequence[Experience]) -> list[Step]:
    """The steps of a rollout, branches in order, turns in order.

    Their rewards sum to the rollout's: what the turns do not account for (everything, when none has a reward; a
    penalty that an operator added) is paid to the last one. An experience without turns is one step, one without
    trained tokens none; a rollout of nothing else is one step of no tokens, so that its reward is compared.
    """
    found = []
    for number, row in sorted(enumerate(rows), key=lambda item: item[1].id.branch):
        actions = np.flatnonzero(row.action_mask)
        if row.turns:
            ordered = sorted(row.turns, key=lambda turn: turn.start)
            found += [Step(number, turn.start, turn.stop, turn.reward or 0.0, turn.state_key) for turn in ordered]
        elif actions.size:
            found.append(Step(number, int(actions[0]), int(actions[-1]) + 1, 0.0, None))
    if not found and rows:
        found.append(Step(0, 0, 0, 0.0, None))
    if found and rows[0].reward is not None:
        last = found[-1]
        rest = math.fsum([rows[0].reward, *(-step.reward for step in found)])
        found[-1] = Step(last.row, last.start, last.stop, last.reward + rest, last.state_key)
    return found


def to_go(values: Sequence[float], discount: float) -> list[float]:
    """Each value plus the discounted sum of all later ones."""
    found, total = [], 0.0
    for value in reversed(values):
        total = value + discount * total
        found.append(total)
    return found[::-1]
