"""What a command asked the launcher for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triune.config import RunConfig
from triune.launcher.folder import Start


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a command asked for.

    Attributes:
        config: The run.
        roles: `("explorer", "trainer")`, or one of them.
        start: New, resumed, or begun again.
        allow_changes: Resume with settings that have changed.
        workflow: From `triune.run(workflow=…)`.
        reward: From `triune.run(reward=…)`.
    """

    config: RunConfig
    roles: tuple[str, ...]
    start: Start
    allow_changes: bool = False
    workflow: Any = None
    reward: Any = None
