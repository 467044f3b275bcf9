"""What a sampling strategy may take of freshly sampled experience, so that it does not wait for what never comes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from triune.errors import ConfigError
from triune.ports import Buffer, Leases

MAIN = "main"


class Allowance:
    """The buffer as a strategy sees it, which counts what it takes of `main` for the first time.

    Admission lets the explorer so far ahead as `fresh_ratio` says and no further. A strategy that leases more than it
    declares uses up the lead, and then trainer and explorer wait for each other: here that is an error.

    Args:
        buffer: What the calls go to.
        strategy: Its name, for messages.
        fresh_ratio: Share of a step's entries that it says are fresh.
        num: Entries of a step.
        lead: Steps that the explorer may be ahead, the present one included.
    """

    def __init__(self, buffer: Buffer, strategy: str, *, fresh_ratio: float, num: int, lead: int) -> None:
        self._buffer, self._strategy = buffer, strategy
        self._fresh_ratio, self._num, self._lead = fresh_ratio, num, lead
        self._first_step: int | None = None
        self._taken = 0
        self._limit = 0

    def begin(self, step: int) -> None:
        """`step` steps are done, and the strategy is asked for the next one's entries."""
        if self._first_step is None:
            self._first_step = step
        self._limit = math.ceil(self._fresh_ratio * self._num * (step - self._first_step + self._lead))

    async def lease(self, num: int, **options: Any) -> Leases:
        """`Buffer.lease`.

        Raises:
            ConfigError: More of `main` than will ever be there at this step.
        """
        if options.get("buffer", MAIN) != MAIN or options.get("again", False):
            return await self._buffer.lease(num, **options)
        if self._taken + num > self._limit:
            raise ConfigError(
                f"algorithm.sampling ({self._strategy})",
                f"asks for {num} fresh groups where at most {max(self._limit - self._taken, 0)} can be there",
                f"its `fresh_ratio` of {self._fresh_ratio:g} of a step's {self._num}",
                "let it lease less from `main`, or say a larger `fresh_ratio`",
            )
        found = await self._buffer.lease(num, **options)
        self._taken += min(len(found), num)  # urgent ones on top are not part of the lead
        return found

    async def give_back(self, uses: Sequence[tuple[str, int]] | None = None, *, dropped_by: str = "") -> int:
        """`Buffer.give_back`: what is given back may be taken again, or is replaced."""
        num = await self._buffer.give_back(uses, dropped_by=dropped_by)
        self._taken = max(self._taken - num, 0)
        return num

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)
