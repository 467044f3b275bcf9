"""Rewards that come hours later, in parts, or never (CONTRACTS C3, C7)."""

from __future__ import annotations

from typing import Any

import pytest

from triune.ports import AdmissionRule
from triune.records import Task
from triune.testing.buffers import ROOMY, BufferWorld, run, states, stays_waiting
from triune.testing.groups import make_group


async def put_waiting(buffer: Any, key: str, rewards: tuple[float | None, ...], deadline_s: float = 3600) -> str:
    """Admit and put a group of which some rewards are not known; its entry."""
    raw = make_group(await buffer.admit(Task(key=key), ROOMY), rewards=rewards)
    return await buffer.put(raw, raw, deadline_s=deadline_s)


def advantages(lease: Any) -> dict[int, float]:
    """Member → its advantage, of those that are trained on."""
    rows = [row for row in lease.group.experiences if row.is_valid]
    return {row.member: float(row.advantages[-1]) for row in rows}


def test_a_group_waits_until_its_last_reward_is_there_whoever_gives_it(world: BufferWorld):
    async def work():
        buffer = await world.start()
        entry = await put_waiting(buffer, "a", (None, None, None))
        for member, by, reward in ((1, "environment", 0.0), (0, "judge", 1.0)):
            patch = {"members": {str(member): {"reward": reward}}}
            assert await buffer.amend(entry, patch, by=by, key=by) == "applied"
            assert await states(buffer) == {entry: "waiting"}
            world.time += 1000
        assert await buffer.amend(entry, {"members": {"2": {"reward": 2.0}}}, by="ann", key="ann") == "applied"
        [lease] = await buffer.lease(1)
        assert advantages(lease) == {0: 0.0, 1: -1.0, 2: 1.0}
        await buffer.check_conservation()

    run(work())


def test_at_its_deadline_a_group_with_enough_rewards_goes_on_without_the_others(world: BufferWorld):
    async def work():
        buffer = await world.start(min_group=2)
        entry = await put_waiting(buffer, "a", (1.0, None, 0.0), deadline_s=30)
        waiting = await stays_waiting(buffer.lease(1))
        world.time += 31
        [lease] = await waiting
        assert lease.entry == entry
        assert advantages(lease) == {0: 0.5, 2: -0.5}
        assert [row["by"] for row in await buffer.amendments(entry)] == ["deadline"]
        assert (await buffer.stats())["refunded"] == 0
        await buffer.check_conservation()

    run(work())


def test_rewards_that_came_before_the_deadline_count_towards_the_least(world: BufferWorld):
    async def work():
        buffer = await world.start(min_group=2)
        entry = await put_waiting(buffer, "a", (None, None, 4.0), deadline_s=30)
        await buffer.amend(entry, {"members": {"0": {"reward": 2.0}}}, by="judge", key="1")
        world.time += 31
        [lease] = await buffer.lease(1)
        assert advantages(lease) == {0: -1.0, 2: 1.0}

    run(work())


@pytest.mark.parametrize("min_group", [None, 3])
def test_at_its_deadline_a_group_with_too_few_rewards_expires(world: BufferWorld, min_group: int | None):
    async def work():
        buffer = await world.start(min_group=min_group)
        entry = await put_waiting(buffer, "a", (1.0, None, 0.0), deadline_s=30)
        world.time += 31
        assert await buffer.lease(1, wait=False) == []
        assert await states(buffer) == {entry: "expired"}
        assert (await buffer.stats())["refunded"] == 1
        await buffer.check_conservation()

    run(work())


def test_a_group_that_is_flat_without_its_late_members_is_dropped_at_its_deadline(world: BufferWorld):
    async def work():
        buffer = await world.start(min_group=2)
        entry = await put_waiting(buffer, "a", (1.0, 1.0, None), deadline_s=30)
        world.time += 31
        assert await buffer.lease(1, wait=False) == []
        assert await states(buffer) == {entry: "dropped"}
        await buffer.check_conservation()

    run(work())


def test_a_reward_after_the_deadline_does_not_bring_its_member_back(world: BufferWorld):
    async def work():
        buffer = await world.start(min_group=2)
        entry = await put_waiting(buffer, "a", (1.0, None, 0.0), deadline_s=30)
        world.time += 31
        await buffer.lease(1)
        await buffer.give_back()
        assert await buffer.amend(entry, {"members": {"1": {"reward": 9.0}}}, by="judge", key="late") == "applied"
        [lease] = await buffer.lease(1)
        assert advantages(lease) == {0: 0.5, 2: -0.5}

    run(work())


def test_after_the_last_task_the_trainer_still_waits_for_late_rewards(world: BufferWorld):
    async def work():
        buffer = await world.start()
        entry = await put_waiting(buffer, "a", (1.0, None))
        await buffer.end("no more tasks")
        waiting = await stays_waiting(buffer.lease(1))
        await buffer.amend(entry, {"members": {"1": {"reward": 0.0}}}, by="judge", key="k")
        assert [lease.entry for lease in await waiting] == [entry]
        await put_waiting(buffer, "b", (None,), deadline_s=30)
        waiting = await stays_waiting(buffer.lease(1))
        world.time += 31
        assert await waiting == []
        await buffer.check_conservation()

    run(work())


def test_the_last_slot_of_a_run_is_given_again_when_the_reward_of_its_group_never_comes(world: BufferWorld):
    async def work():
        buffer = await world.start()
        rule = AdmissionRule(max_staleness=0, fresh=10, limit=1)
        raw = make_group(await buffer.admit(Task(key="a"), rule), rewards=(None,))
        await buffer.put(raw, deadline_s=30)
        waiting = await stays_waiting(buffer.admit(Task(key="b"), rule))
        world.time += 31
        group = await waiting
        assert group is not None
        assert group.task_key == "b"

    run(work())
