"""Nothing that is too old."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from triune.ports import Buffer, Leases
from triune.registry import brick


@brick("sampling")
@dataclass(frozen=True, kw_only=True)
class Bounded:
    """Train in order of age, but never on what is more than `versions` published steps old.

    A tighter bound than the one that admission keeps: `sync.max_staleness: 4` lets the explorer run four versions
    ahead, `versions: 2` trains on nothing older than two. What is older is dropped, counted (`num_stale_dropped`), and
    its task made again, at most `sync.max_stale_retries` times.

    Attributes:
        versions: Published steps that the oldest token of an entry may be behind the newest version.
    """

    versions: Annotated[int, Field(ge=0)] = 1
    fresh_ratio: ClassVar[float] = 1.0
    buffers: ClassVar[tuple[str, ...]] = ("main",)

    async def __call__(
        self, buffer: Buffer, num: int, *, step: int = 0, max_staleness: int | None = None, ahead: int | None = None
    ) -> Leases:
        """Lease up to `num` entries; waits for them, and returns fewer only at the end of the data."""
        bound = self.versions if max_staleness is None else min(self.versions, max_staleness)
        return await buffer.lease(num, max_staleness=bound, ahead=ahead, order="age", step=step)
