"""What is stored, leased, ranked and amended as one: all records of one task instance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

import msgspec
import numpy as np

from triune.records.experience import Experience
from triune.records.ids import GroupId
from triune.records.task import Task
from triune.shapes import RewardsG


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Two answers to one prompt, one preferred; masks may cover a suffix only.

    Attributes:
        chosen: The preferred experience.
        rejected: The other one; same prompt tokens.
        weight: Weight of this comparison in the loss.
        margin: How much better; 0 = not said.
        by: Who preferred it (a person's or judge's name).
        info: Free.
    """

    chosen: Experience
    rejected: Experience
    weight: float = 1.0
    margin: float = 0.0
    by: str = ""
    info: Mapping[str, Any] = {}
    unknown: Mapping[str, Any] = {}


class Text(msgspec.Struct, frozen=True, kw_only=True):
    """Plain text for continued pre-training, already tokenised: int32[T]."""

    id: str
    tokens: Any
    info: Mapping[str, Any] = {}
    unknown: Mapping[str, Any] = {}


Record = Experience | Pair | Text


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the buffer: the experiences of all rollouts of a task instance, or single imported records.

    Statistics are over rollouts, each counted once: all experiences of a rollout share its reward.
    """

    id: GroupId
    task: Task
    records: tuple[Record, ...]
    info: Mapping[str, Any] = {}
    unknown: Mapping[str, Any] = {}

    def __len__(self) -> int:
        return len(self.records)

    @property
    def experiences(self) -> tuple[Experience, ...]:
        """All records, when they are experiences."""
        assert all(map(isinstance, self.records, repeat(Experience))), "a group of pairs or texts"
        return self.records  # type: ignore[return-value]

    @property
    def members(self) -> dict[int, list[Experience]]:
        """Experiences by rollout number, in order of first appearance."""
        found: dict[int, list[Experience]] = {}
        for experience in self.experiences:
            found.setdefault(experience.id.rollout.member, []).append(experience)
        return found

    @property
    def valid_members(self) -> dict[int, list[Experience]]:
        """Rollouts that enter statistics: valid, and with a known reward."""
        return {
            member: rows
            for member, rows in self.members.items()
            if all(row.is_valid and row.reward is not None for row in rows)
        }

    @property
    def is_waiting(self) -> bool:
        """Whether a valid rollout's reward is not known yet; False of pairs and texts, which have none."""
        return any(isinstance(row, Experience) and row.is_valid and row.reward is None for row in self.records)

    @property
    def rewards(self) -> RewardsG:
        """float64[G]: reward of each valid rollout, in the order of `valid_members`."""
        return np.array([rows[0].reward for rows in self.valid_members.values()], dtype=np.float64)

    def with_records(self, records: Sequence[Record]) -> Group:
        """Copy with other records."""
        return msgspec.structs.replace(self, records=tuple(records))

    def map(self, change: Any) -> Group:
        """Copy with `change(experience)` in place of every experience."""
        return self.with_records([change(experience) for experience in self.experiences])
