"""Newest version first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from triune.ports import Buffer, Leases
from triune.registry import brick


@brick("sampling")
@dataclass(frozen=True, kw_only=True)
class Freshest:
    """Train on what the newest version of the weights sampled first, each entry once.

    Where the explorer runs ahead (`sync.max_staleness` above 0) this keeps ratios near 1, at the price of entries that
    grow too old in the queue: they are dropped and their tasks made again (`num_stale_dropped`). `fifo` wastes none
    and trains on older ones. Without staleness there is nothing to choose.
    """

    fresh_ratio: ClassVar[float] = 1.0
    buffers: ClassVar[tuple[str, ...]] = ("main",)
    is_timed: ClassVar[bool] = True
    fixes_order: ClassVar[bool] = True

    async def __call__(
        self, buffer: Buffer, num: int, *, step: int = 0, max_staleness: int | None = None, ahead: int | None = None
    ) -> Leases:
        """Lease up to `num` entries; waits for them, and returns fewer only at the end of the data."""
        return await buffer.lease(num, max_staleness=max_staleness, ahead=ahead, order="newest", step=step)
