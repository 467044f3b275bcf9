"""A version ledger in memory, for tests of weight channels and trainers without a buffer."""

from __future__ import annotations

from triune.ports import WeightUpdate


class MemoryLedger:
    """Issues versions and remembers what was committed, in order."""

    def __init__(self) -> None:
        self.issued = 0
        self.committed: list[WeightUpdate] = []

    async def begin_version(self, step: int) -> int:
        """The next number."""
        self.issued += 1
        return self.issued - 1

    async def commit_version(self, update: WeightUpdate) -> None:
        """Append to `committed`."""
        self.committed.append(update)
