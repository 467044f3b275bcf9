"""Write advantages per rollout into the token streams of a group."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from triune.errors import RecordError
from triune.records import Group


def credit(group: Group, advantages_G: Iterable[float]) -> Group:
    """Give every action token of a rollout the rollout's advantage.

    Args:
        group: The group.
        advantages_G: One number per valid rollout, in the order of `group.valid_members`; a rollout's experiences
            share it.

    Returns:
        The group's valid rollouts with the stream `advantages`: float32[T], 0 outside the action mask. Invalid rollouts
        have no advantage, hence no place in the batch; they stay in the stored raw group.

    Raises:
        RecordError: An experience belongs to another group: rewards of different tasks cannot be compared.
    """
    for row in group.experiences:
        if row.id.rollout.group != group.id:
            raise RecordError(str(group.id), f"it holds {row.id}", "experiences of this group only")
    records = []
    for rows, advantage in zip(group.valid_members.values(), advantages_G, strict=True):
        value = np.float32(advantage)
        records += [row.with_streams(advantages=row.action_mask * value) for row in rows]
    return group.with_records(records)
