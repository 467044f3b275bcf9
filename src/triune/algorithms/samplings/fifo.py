"""First in, first out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from triune.ports import Buffer, Lease
from triune.registry import brick


@brick("sampling")
@dataclass(frozen=True, kw_only=True)
class Fifo:
    """Train on entries in the order of the buffer: by priority class, then by age, each once.

    Attributes:
        buffer: Name of the buffer to lease from.
    """

    buffer: str = "main"
    fresh_ratio: ClassVar[float] = 1.0
    """Share of a batch that newly admitted groups make up (CONTRACTS C5)."""

    async def __call__(
        self, buffer: Buffer, num: int, *, max_staleness: int | None = None, ahead: int | None = None
    ) -> list[Lease]:
        """Lease up to `num` entries; waits for them, and returns fewer only at the end of the data."""
        return await buffer.lease(num, buffer=self.buffer, max_staleness=max_staleness, ahead=ahead)
