"""A bound on what waits: who is evicted, who never is, and that the sums stay right."""

from __future__ import annotations

from typing import Any

import pytest

from triune.errors import StoreError
from triune.ports import AdmissionRule
from triune.records import GroupId, Source, Task
from triune.registry import build
from triune.testing.buffers import BufferWorld, fill, publish, put_group, run, states
from triune.testing.groups import make_group


async def by_state(buffer: Any) -> dict[str, str]:
    """State → keys of the tasks that are in it."""
    found: dict[str, str] = {}
    for entry, state in sorted((await states(buffer)).items()):
        found[state] = found.get(state, "") + entry.split("/")[2]
    return found


@pytest.mark.parametrize(("evict", "kept"), [("oldest", "cd"), ("lowest", "ad"), ("stalest", "ab")])
def test_beyond_the_capacity_the_policy_says_who_goes(world: BufferWorld, evict: Any, kept: str):
    async def work():
        buffer = await world.start(capacity=2, evict=evict)
        for step in range(3):
            await publish(buffer, step)
        await put_group(buffer, "a", version=2, priority=1.0)
        await put_group(buffer, "b", version=1, priority=0.0)
        await put_group(buffer, "c", version=0, priority=0.0)
        await put_group(buffer, "d", version=0, priority=2.0)
        assert (await by_state(buffer))["ready"] == kept
        assert {info.reason for info in await buffer.browse(state="evicted")} == {evict}
        numbers = await buffer.check_conservation()
        assert numbers[f"evicted/{evict}"] == numbers["entries/evicted"] == 2

    run(work())


def test_no_priority_is_too_low_to_be_evicted(world: BufferWorld):
    async def work():
        buffer = await world.start(capacity=1, evict="lowest")
        await put_group(buffer, "a", priority=-1.7e308, rewards=(1.0,))
        await put_group(buffer, "b", priority=-1.0)
        assert (await by_state(buffer))["ready"] == "b"

    run(work())


def test_the_lowest_is_what_the_run_s_priority_puts_last(world: BufferWorld):
    async def work():
        priority = build("priority", "reward_weighted", "")
        buffer = await world.start(capacity=2, evict="lowest", priority=priority)
        for key, reward in (("a", 0.5), ("b", 0.9), ("c", 0.1), ("d", 0.7)):
            await put_group(buffer, key, rewards=(reward,))
        assert (await by_state(buffer))["ready"] == "bd"

    run(work())


def test_an_evicted_entry_gives_its_slot_and_its_bytes_back_and_says_so_when_it_is_read(world: BufferWorld):
    async def work():
        buffer = await world.start(capacity=1)
        rule = AdmissionRule(max_staleness=0, fresh=2)
        for key in "abc":  # the third slot is that of the evicted first
            group = make_group(await buffer.admit(Task(key=key), rule))
            await buffer.put(group, group)
        assert await by_state(buffer) == {"evicted": "ab", "ready": "c"}
        assert (await buffer.stats())["refunds/evicted"] == 2
        assert buffer.store.db.one("SELECT count(*) FROM revisions") == (1,)
        with pytest.raises(StoreError, match=r"evicted \(oldest\): its bytes were freed; .*raise buffer.capacity"):
            await buffer.read("r/train/a/0")
        assert await buffer.amend("r/train/a/0", {"reward": 1.0}, by="ann", key="k") == "expired"

    run(work())


def test_what_is_leased_used_urgent_amended_by_a_person_or_without_its_reward_is_never_evicted(world: BufferWorld):
    async def work():
        buffer = await world.start(capacity=1)
        leased = await put_group(buffer, "leased")
        await buffer.lease(1)
        used = await put_group(buffer, "used")
        [lease] = await buffer.lease(1, max_uses=2, step=0)
        await buffer.ack([(used, lease.use_no)], checkpoint="c", step=1)
        human = make_group(GroupId("r", "people", "urgent", 0), source=Source.HUMAN)
        await buffer.put(human, human)
        await put_group(buffer, "waits", rewards=(None, 1.0))
        [liked] = await fill(buffer, 1)
        await buffer.amend(liked, {"members": {"0": {"reward": 3.0}}}, by="ann", key="1")
        await fill(buffer, 6)
        found = await states(buffer)
        assert [found[entry] for entry in (leased, used, str(human.id), liked)] == ["ready"] * 4
        assert found["r/train/waits/0"] == "waiting"
        assert (await buffer.stats())["entries/evicted"] == 6, "one waits besides the one that ann likes"
        await buffer.check_conservation()

    run(work())


@pytest.mark.parametrize(("by", "is_kept"), [("judge", False), ("judge:strict", False), ("judith", True)])
def test_what_a_machine_amended_may_be_evicted_and_what_a_person_amended_not(
    world: BufferWorld, by: str, is_kept: bool
):
    async def work():
        buffer = await world.start(capacity=1)
        [first] = await fill(buffer, 1)
        await buffer.amend(first, {"members": {"0": {"reward": 3.0}}}, by=by, key="1")
        await fill(buffer, 1)
        assert (await states(buffer))[first] == ("ready" if is_kept else "evicted")

    run(work())


def test_each_buffer_of_each_run_has_its_own_bound_and_what_is_open_to_every_run_has_none(world: BufferWorld):
    async def work():
        first, second = await world.start("r", capacity=2), await world.start("s", capacity=2)
        for buffer, name in ((first, "r"), (second, "s")):
            await fill(buffer, 2)
            for key in "abc":
                group = make_group(GroupId(name, "side", key, 0))
                await buffer.put(group, group, buffer="side")
        assert (await first.stats())["entries/ready"] == 10

    run(work())


@pytest.mark.parametrize(("capacity", "bound"), [(100, 100), (256, 256 + 3 * 3)])
def test_each_process_passes_a_large_capacity_by_less_than_a_64th_and_a_small_one_by_nothing(
    world: BufferWorld, capacity: int, bound: int
):
    async def work():
        first = await world.start(capacity=capacity)
        await publish(first, 0)
        others = [world.open(capacity=capacity) for _ in range(2)]
        for buffer in others:
            await buffer.join_run("r", timeout_s=5)
        most = 0
        for number in range(capacity + 40):
            buffer = (first, *others)[number % 3]
            await put_group(buffer, f"t{number}")
            if number >= capacity:
                most = max(most, int((await first.stats())["entries/ready"]))
        assert min(capacity + 1, bound) <= most <= bound
        await first.check_conservation()

    run(work())
