"""What a channel needs of the buffer: version numbers that are never reused."""

from __future__ import annotations

from typing import Protocol

from triune.ports import WeightUpdate


class VersionLedger(Protocol):
    """The part of the buffer that issues and commits versions."""

    async def begin_version(self, step: int) -> int:
        """Reserve the next version number."""
        ...

    async def commit_version(self, update: WeightUpdate) -> None:
        """The weights can be fetched from now on."""
        ...
