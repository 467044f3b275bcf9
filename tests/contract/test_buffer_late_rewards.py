"""Rewards that come hours later, in parts, or never (CONTRACTS C3, C7)."""

from __future__ import annotations

from typing import Any

import pytest

from triune.ports import AdmissionRule, Refund
from triune.records import Task
from triune.testing.buffers import ROOMY, BufferWorld, fill, publish, run, states, stays_waiting
from triune.testing.groups import make_group, with_mean_advantages


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


@pytest.mark.parametrize("rewards", [(1.0, 0.0, None), (1.0, 1.0, None), (None, None, None)])
def test_what_operators_made_of_a_group_without_all_rewards_does_not_count(
    world: BufferWorld, rewards: tuple[float | None, ...]
):
    async def work():
        buffer = await world.start()
        raw = make_group(await buffer.admit(Task(key="a"), ROOMY), rewards=rewards)
        known = [row for row in raw.experiences if row.reward is not None]
        shaped = with_mean_advantages(raw.with_records(known))
        entry = await buffer.put(raw, shaped, dropped_by="" if shaped else "drop_flat_groups")
        assert await states(buffer) == {entry: "waiting"}
        assert (await buffer.stats())["refunded"] == 0
        patch = {"members": {"0": {"reward": 0.0}, "1": {"reward": 0.0}, "2": {"reward": 3.0}}}
        assert await buffer.amend(entry, patch, by="judge", key="k") == "applied"
        [lease] = await buffer.lease(1)
        assert advantages(lease) == {0: -1.0, 1: -1.0, 2: 2.0}
        await buffer.check_conservation()

    run(work())


def test_a_group_that_is_given_up_is_dropped_with_its_refund_also_without_all_rewards(world: BufferWorld):
    async def work():
        buffer = await world.start()
        raw = make_group(await buffer.admit(Task(key="a"), ROOMY), rewards=(1.0, None))
        for _ in range(2):
            await buffer.put(raw, refund=Refund.TOO_SMALL)
        [info] = await buffer.browse()
        assert (info.state, info.reason) == ("dropped", "too_small")
        stats = await buffer.stats()
        assert (stats["refunded"], stats["refunds/too_small"], stats["late"]) == (1, 1, 0)
        await buffer.check_conservation()

    run(work())


def test_deadlines_are_for_the_processes_of_the_run_with_its_pipeline_and_its_least_number(world: BufferWorld):
    async def work():
        one = await world.start("one", min_group=2)
        entry = await put_waiting(one, "a", (1.0, None, 0.0), deadline_s=30)
        world.time += 31
        for other in (await world.start("two", min_group=2, reshape=lambda group: group), await world.start("three")):
            assert await other.lease(1, wait=False) == []
            assert await states(other) == {entry: "waiting"}
        await one.renew()
        [lease] = await one.lease(1)
        assert advantages(lease) == {0: 0.5, 2: -0.5}
        await one.check_conservation()

    run(work())


@pytest.mark.parametrize("run_of_judge", ["one", "two"])
def test_a_reward_from_a_process_without_the_run_s_pipeline_is_shaped_by_one_that_has_it(
    world: BufferWorld, run_of_judge: str
):
    async def work():
        one = await world.start("one")
        if run_of_judge == "one":
            await publish(one, 0)
            judge = world.open(reshape=None)
            await judge.join_run("one", timeout_s=5)
        else:
            judge = await world.start("two", reshape=lambda group: group)
        entry = await put_waiting(one, "a", (1.0, None))
        waiting = await stays_waiting(one.lease(1))
        patch = {"members": {"1": {"reward": 0.0}}}
        assert await judge.amend(entry, patch, by="judge", key="k") == "deferred"
        assert advantages((await waiting)[0]) == {0: 0.5, 1: -0.5}
        assert await judge.amend(entry, patch, by="judge", key="k") == "applied"
        await one.check_conservation()

    run(work())


def test_a_run_without_operators_takes_late_rewards_as_they_are(world: BufferWorld):
    async def work():
        buffer = await world.start(reshape=None)
        entry = await put_waiting(buffer, "a", (1.0, None))
        await buffer.amend(entry, {"members": {"1": {"reward": 0.0}}}, by="judge", key="k")
        [lease] = await buffer.lease(1)
        assert [row.reward for row in lease.group.experiences] == [1.0, 0.0]

    run(work())


def test_a_reward_that_is_taken_back_is_waited_for_until_a_deadline_of_its_own_each_time(world: BufferWorld):
    async def work():
        buffer = await world.start(min_group=2, reward_deadline_s=30)
        [entry] = await fill(buffer, 1, rewards=(1.0, 0.0, 5.0, 7.0))
        for member in (2, 3):
            patch = {"members": {str(member): {"reward": None}}}
            assert await buffer.amend(entry, patch, by="ann", key=f"k{member}") == "applied"
            assert await states(buffer) == {entry: "waiting"}
            waiting = await stays_waiting(buffer.lease(1))
            world.time += 31
            [lease] = await waiting
            assert member not in advantages(lease)
            await buffer.give_back()
        assert advantages(lease) == {0: 0.5, 1: -0.5}
        for member in (0, 1):
            await buffer.amend(entry, {"members": {str(member): {"reward": None}}}, by="ann", key=f"k{member}")
        world.time += 31
        assert await buffer.lease(1, wait=False) == []
        assert await states(buffer) == {entry: "expired"}
        assert (await buffer.stats())["refunded"] == 1
        await buffer.check_conservation()

    run(work())


def test_a_used_group_whose_reward_is_taken_back_is_spent_at_the_deadline_and_expires_if_its_use_is_undone(
    world: BufferWorld,
):
    async def work():
        buffer = await world.start(reward_deadline_s=30)
        [entry] = await fill(buffer, 1)
        [lease] = await buffer.lease(1, step=0, max_uses=2)
        await buffer.ack([(entry, lease.use_no)], checkpoint="c", step=1)
        await buffer.amend(entry, {"members": {"0": {"reward": None}}}, by="ann", key="k")
        world.time += 31
        assert await buffer.lease(1, wait=False) == []
        assert await states(buffer) == {entry: "spent"}
        assert (await buffer.stats())["refunded"] == 0
        await buffer.check_conservation()
        again = await world.start()
        await again.resume_at(step=0, version=0, consumed=[], checkpoint="", strict=False)
        assert await again.lease(1, wait=False) == []
        assert await states(again) == {entry: "expired"}
        await again.check_conservation()

    run(work())


def test_what_was_trained_on_is_not_reissued_with_a_reward_that_nobody_knows(world: BufferWorld):
    async def work():
        buffer = await world.start()
        [entry] = await fill(buffer, 1, rewards=(1.0, 0.0, 5.0))
        [lease] = await buffer.lease(1)
        await buffer.ack([(entry, lease.use_no)], checkpoint="c", step=1)
        assert await buffer.amend(entry, {"members": {"0": {"reward": None}}}, by="ann", key="k") == "expired"
        assert await states(buffer) == {entry: "spent"}

    run(work())
