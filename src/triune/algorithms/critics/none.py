"""No critic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from triune.registry import brick


@brick("critic", "none")
@dataclass(frozen=True, kw_only=True)
class NoCritic:
    """Train no value model."""

    makes_values: ClassVar[bool] = False
    expected_gradient: ClassVar[str] = "nothing"
