"""Most important first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from triune.ports import Buffer, Leases
from triune.registry import brick


@brick("sampling")
@dataclass(frozen=True, kw_only=True)
class Priority:
    """Train on the entries with the highest priority, or mean reward, first; each once, ties by age.

    An operator writes `Experience.priority`, an amendment may change it; an entry's is the mean over its experiences.
    Entries that never come first grow too old, are dropped, and their tasks made again (`num_stale_dropped`). Where
    everything that is there is trained on in the next step (`sync.max_staleness: 0`), there is nothing to choose.
    Where the run file names a `buffer.priority`, that function decides what is important, anew at every lease.
    Choosing by reward changes which tasks are trained on, not what is learnt of one: advantages were computed before.

    Attributes:
        by: `priority` = the stored field; `reward` = mean reward of the group's rollouts.
    """

    by: Literal["priority", "reward"] = "priority"
    fresh_ratio: ClassVar[float] = 1.0
    buffers: ClassVar[tuple[str, ...]] = ("main",)
    is_timed: ClassVar[bool] = True

    @property
    def fixes_order(self) -> bool:
        """Whether `buffer.priority` would have no effect."""
        return self.by != "priority"

    async def __call__(
        self, buffer: Buffer, num: int, *, step: int = 0, max_staleness: int | None = None, ahead: int | None = None
    ) -> Leases:
        """Lease up to `num` entries; waits for them, and returns fewer only at the end of the data."""
        return await buffer.lease(num, max_staleness=max_staleness, ahead=ahead, order=self.by, step=step)
