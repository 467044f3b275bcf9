"""A clock that only moves when a test says so."""

from __future__ import annotations

import asyncio
import heapq
from itertools import count


class FakeClock:
    """Sleepers wake in order of their time, at once, when the test advances the clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._number = count()

    async def sleep(self, seconds: float) -> None:
        """Wait until the clock has moved so far; 0 or less only gives the event loop a turn."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now + seconds, next(self._number), future))
        await future

    async def advance(self, seconds: float) -> None:
        """Move on, waking each sleeper at its time and letting it run (and sleep again) before the next."""
        end = self.now + seconds
        await self._settle()
        while self._sleepers and self._sleepers[0][0] <= end:
            self.now, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                future.set_result(None)
            await self._settle()
        self.now = end

    async def advance_to_next(self) -> bool:
        """Move to the next sleeper's time; False when nobody sleeps."""
        await self._settle()
        while self._sleepers and self._sleepers[0][2].done():
            heapq.heappop(self._sleepers)
        if not self._sleepers:
            return False
        await self.advance(self._sleepers[0][0] - self.now)
        return True

    @staticmethod
    async def _settle() -> None:
        for _ in range(20):
            await asyncio.sleep(0)
