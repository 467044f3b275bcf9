"""Drop rollouts that could not be judged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from triune.records import Group
from triune.registry import brick


@brick("operator")
@dataclass(frozen=True, kw_only=True)
class DropInvalid:
    """Remove rollouts whose verifier or environment failed, with all their experiences: not wrong, but unknown.

    Attributes:
        min_group: Fewest valid rollouts a group must keep; below, it is dropped.
    """

    min_group: Annotated[int, Field(ge=1)] = 1

    def __call__(self, group: Group) -> Group | None:
        """Return the group's valid part, the group itself when all are valid, or None."""
        valid = group.valid_members
        if len(valid) < self.min_group:
            return None
        kept = [row for rows in valid.values() for row in rows]
        return group if len(kept) == len(group) else group.with_records(kept)
