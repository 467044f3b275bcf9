"""First in, first out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from triune.ports import Buffer, Leases
from triune.registry import brick


@brick("sampling")
@dataclass(frozen=True, kw_only=True)
class Fifo:
    """Train on entries in the order in which their tasks were admitted, each once.

    A `buffer.priority` in the run file takes the place of that order.

    Attributes:
        buffer: Name of the buffer to lease from.
    """

    buffer: str = "main"
    fresh_ratio: ClassVar[float] = 1.0

    @property
    def buffers(self) -> tuple[str, ...]:
        """The one it leases from."""
        return (self.buffer,)

    async def __call__(
        self, buffer: Buffer, num: int, *, step: int = 0, max_staleness: int | None = None, ahead: int | None = None
    ) -> Leases:
        """Lease up to `num` entries; waits for them, and returns fewer only at the end of the data."""
        return await buffer.lease(
            num, buffer=self.buffer, max_staleness=max_staleness, ahead=ahead, order="age", step=step
        )
