"""DAPO's dynamic sampling."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from triune.errors import RewardError
from triune.ports import Buffer, Lease, Leases
from triune.records import Experience, Source
from triune.registry import brick

log = logging.getLogger("triune.algorithms")


@brick("sampling")
@dataclass(frozen=True, kw_only=True)
class Dynamic:
    """Go on leasing until a step has as many groups with spread in their rewards as it should have.

    A group whose rollouts all got the same reward has no advantage; in the batch it only thins the others out. Such
    groups are dropped, their slots given back, and the explorer makes as many others, at most `max_tries` times or
    until `max_extra` were replaced. Then the step trains on what there is, the last flat groups are acknowledged
    untrained, and `num_flat`, `num_tries` and `num_short` say so. With nothing but flat groups the step is made of
    those, moves nothing and is counted: tasks that are never solved end with the run's steps, they do not hang it.

    The spread is that of the reward the task gave, before any shaping (a length penalty gives spread to answers that
    are all wrong). The operator `drop_flat_groups` does it where groups are made, without a bound per step.

    Source: DAPO, arXiv:2503.14476, section 3.2.

    Attributes:
        max_tries: Batches a step may ask for.
        max_extra: Flat groups a step may have replaced; null = only `max_tries` bounds them.
        part: Raw part of the reward to compare; empty = the task's whole reward.
        tolerance: Spread up to which a group is flat, in the unit of the reward.
    """

    max_tries: Annotated[int, Field(ge=1)] = 10
    max_extra: Annotated[int, Field(ge=0)] | None = None
    part: str = ""
    tolerance: Annotated[float, Field(ge=0)] = 1e-9
    fresh_ratio: ClassVar[float] = 1.0
    buffers: ClassVar[tuple[str, ...]] = ("main",)
    drops_flat_groups: ClassVar[bool] = True

    async def __call__(
        self, buffer: Buffer, num: int, *, step: int = 0, max_staleness: int | None = None, ahead: int | None = None
    ) -> Leases:
        """Lease until `num` groups have spread, the tries are used up, or the data ends."""
        kept, flat, num_kept, num_flat, tries = Leases(), [], 0, 0, 0
        while num_kept < num:
            found = await buffer.lease(num - num_kept, max_staleness=max_staleness, ahead=ahead, order="age", step=step)
            if not found:
                break
            flat, tries = [], tries + 1
            for lease in found:
                (flat if self.is_flat(lease) else kept).append(lease)
            num_kept = sum(not lease.is_urgent for lease in kept)
            if tries >= self.max_tries or (self.max_extra is not None and num_flat + len(flat) > self.max_extra):
                break
            num_flat += len(flat)
            await buffer.give_back(_uses(flat), dropped_by="flat")
            flat = []
        if kept and flat:
            await buffer.ack(_uses(flat), checkpoint="skipped", step=step + 1)
        if not kept and flat:
            log.warning(
                "step %d: no group of %d had spread in its rewards: nothing to learn", step + 1, num_flat + len(flat)
            )
        numbers = {"num_tries": tries, "num_flat": num_flat + len(flat), "num_short": num - num_kept}
        return Leases(kept or flat, {name: float(value) for name, value in numbers.items()})

    def is_flat(self, lease: Lease) -> bool:
        """Whether all valid rollouts of a sampled group got the same raw reward."""
        rows = lease.group.records
        if not all(isinstance(row, Experience) and row.source is Source.POLICY for row in rows):
            return False
        rewards = [self._raw(rows[0]) for rows in lease.group.valid_members.values()]
        return not rewards or max(rewards) - min(rewards) <= self.tolerance

    def _raw(self, row: Experience) -> float:
        if self.part:
            if self.part not in row.reward_parts:
                have = ", ".join(row.reward_parts) or "none"
                raise RewardError(str(row.id), f"no reward part {self.part!r}", f"one of its parts ({have})")
            return row.reward_parts[self.part]
        reward = row.metrics.get("raw_reward", row.reward)  # kept by operators that change a reward
        assert reward is not None, "valid members have a reward"
        return reward


def _uses(leases: list[Lease]) -> list[tuple[str, int]]:
    return [(lease.entry, lease.use_no) for lease in leases]
