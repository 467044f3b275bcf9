"""Entries that are used several times, through random crashes: the uses of a checkpoint survive, and no others."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from triune.buffer.stores.sqlite import SQLite
from triune.testing.buffers import BufferWorld, fill, publish, run

MAX_USES, COOLDOWN, NUM = 3, 1, 2


class Trainer:
    """Takes fresh and used entries in turn, saves now and then, and is killed now and then."""

    def __init__(self, world: BufferWorld, buffer: Any) -> None:
        self.world, self.buffer = world, buffer
        self.step, self.version = 0, 0
        self.held: list[tuple[str, int]] = []  # leased, in no checkpoint
        self.trained: dict[str, list[int]] = {}  # entry → steps of its uses
        self.checkpoint: tuple[int, int, list[tuple[str, int]], dict[str, list[int]]] = (0, 0, [], {})

    async def train(self) -> None:
        await fill(self.buffer, NUM, version=self.version)
        options = {"step": self.step, "max_uses": MAX_USES, "order": "age", "wait": False}
        fresh = await self.buffer.lease(NUM, **options)
        assert not [lease for lease in fresh if lease.entry in self.trained], "an entry is new once"
        old = await self.buffer.lease(NUM, **options, again=True, cooldown=COOLDOWN)
        for lease in old:
            steps = self.trained[lease.entry]
            assert len(steps) < MAX_USES
            assert self.step - steps[-1] > COOLDOWN
        for lease in (*fresh, *old):
            self.trained.setdefault(lease.entry, []).append(self.step)
            self.held.append((lease.entry, lease.use_no))
        self.step += 1
        self.version = await publish(self.buffer, self.step)

    async def save(self, chance: random.Random) -> None:
        trained = {entry: list(steps) for entry, steps in self.trained.items()}
        self.checkpoint = (self.step, self.version, list(self.held), trained)
        if chance.random() < 0.5:  # else it is killed between the checkpoint and its acknowledgement
            await self.buffer.ack(self.held, checkpoint="c", step=self.step)
            self.held = []
        else:
            await self.resume()

    async def resume(self) -> None:
        self.world.crash(self.buffer)
        self.buffer = await self.world.start()
        self.step, self.version, consumed, trained = self.checkpoint
        self.trained = {entry: list(steps) for entry, steps in trained.items()}
        await self.buffer.resume_at(
            step=self.step, version=self.version, consumed=consumed, checkpoint="c", strict=True
        )
        self.held = []

    async def compare(self) -> None:
        await self.buffer.check_conservation()
        stats = await self.buffer.stats()
        assert stats["uses/acked"] + stats["uses/leased"] == sum(map(len, self.trained.values()))
        states = Counter(info.state.value for info in await self.buffer.browse(limit=10**6))
        assert states["spent"] == await self.num_spent()

    async def num_spent(self) -> int:
        in_hand = {entry for entry, _ in self.held}
        return sum(len(steps) == MAX_USES and entry not in in_hand for entry, steps in self.trained.items())


@pytest.mark.parametrize("seed", range(4))
def test_what_is_used_again_survives_crashes_as_the_checkpoint_says(tmp_path: Path, seed: int):
    world, chance = BufferWorld(SQLite(synchronous="off"), tmp_path), random.Random(seed)

    async def work() -> None:
        buffer = await world.start()
        await publish(buffer, 0)
        trainer = Trainer(world, buffer)
        for _ in range(30):
            await trainer.train()
            if chance.random() < 0.3:
                await trainer.save(chance)
            elif chance.random() < 0.2:
                await trainer.resume()
            await trainer.compare()
        assert max(map(len, trainer.trained.values())) == MAX_USES

    try:
        run(work())
    finally:
        world.end()
