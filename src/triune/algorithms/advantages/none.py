"""No advantage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from triune.records import Group
from triune.registry import brick


@brick("advantage", "none")
@dataclass(frozen=True, kw_only=True)
class NoAdvantage:
    """Leave groups as they are, for losses that imitate."""

    where: ClassVar[str] = "pipeline"
    makes_advantages: ClassVar[bool] = False

    def __call__(self, group: Group) -> Group:
        """Return the group itself."""
        return group
