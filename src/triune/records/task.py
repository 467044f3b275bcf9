"""What to do: data plus the names of a workflow and a reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a task set.

    Attributes:
        key: Identity inside its task set: the row's own id, or a hash of its data.
        data: The row (JSON-like values), after field mapping.
        taskset: Name of the task set it came from.
        workflow: Name of the workflow brick, with its fields, when the row chooses one; None = the task set's.
        reward: Likewise for the reward.
        info: Free; not shown to the model.
    """

    key: str
    data: Mapping[str, Any] = {}
    taskset: str = "train"
    workflow: Mapping[str, Any] | None = None
    reward: Mapping[str, Any] | None = None
    info: Mapping[str, Any] = {}
