"""What a lease takes first, what it takes again, and buffers beside the main one (CONTRACTS C3, C5)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from triune.ports import AdmissionRule
from triune.records import GroupId, Source, Task
from triune.testing.buffers import BufferWorld, fill, publish, put_group, run, states, stays_waiting
from triune.testing.groups import make_group


def keys(leases: Any) -> list[str]:
    return [lease.group.id.task_key for lease in leases]


async def three(buffer: Any) -> None:
    """`a` is the earliest, `b` has the highest reward and the newest version, `c` the highest priority."""
    for step in range(3):
        await publish(buffer, step)
    await put_group(buffer, "a", version=1, rewards=(0.5, 0.0))
    await put_group(buffer, "b", version=2, rewards=(1.0, 1.0))
    await put_group(buffer, "c", version=0, rewards=(0.0, 0.0), priority=3.0)


@pytest.mark.parametrize(
    ("order", "expected"), [("age", "abc"), ("newest", "bac"), ("reward", "bac"), ("priority", "cab")]
)
def test_a_lease_takes_first_what_comes_first_in_its_order(world: BufferWorld, order: Any, expected: str):
    async def work():
        buffer = await world.start()
        await three(buffer)
        assert keys(await buffer.lease(2, order=order)) == list(expected[:2])
        assert keys(await buffer.lease(1, order=order)) == [expected[2]]

    run(work())


@pytest.mark.parametrize("order", ["age", "newest", "reward", "priority"])
def test_entries_of_this_run_and_those_open_to_every_run_are_leased_in_one_order(
    world: BufferWorld, order: Any, tmp_path: Any
):
    async def work():
        buffer = await world.start()
        for number in range(4):
            group = make_group(
                GroupId("r", "train", str(number), 0), version=number % 3, rewards=(number % 2, 0.0), priority=-number
            )
            if number % 2:
                await buffer.put(group, group, buffer="side")
            else:
                assert await buffer.stock([group], buffer="side") == 1
        batch = await buffer.lease(4, buffer="side", order=order)
        expected = {"age": "0123", "newest": "2103", "reward": "1302", "priority": "0123"}
        assert keys(batch) == list(expected[order])

    run(work())


@pytest.mark.parametrize("order", ["age", "newest", "priority", "reward"])
def test_what_is_too_old_is_dropped_wherever_it_stands_and_counted(world: BufferWorld, order: Any):
    async def work():
        buffer = await world.start()
        for step in range(4):
            await publish(buffer, step)
        for key, version in (("old", 0), ("new", 3), ("older", 1)):
            await put_group(buffer, key, version=version)
        leases = await buffer.lease(1, max_staleness=1, order=order)
        assert keys(leases) == ["new"]
        assert leases.metrics == {"num_stale_dropped": 2.0}
        assert (await buffer.stats())["refunds/stale"] == 2
        await buffer.check_conservation()

    run(work())


# ------------------------------------------------------------------------------------------------------- again


async def use(at: Any, num: int, step: int, **options: Any) -> list[tuple[str, int]]:
    """Lease what may be used three times, and acknowledge it as a checkpoint after this step does."""
    leases = await at.lease(num, step=step, max_uses=3, order="age", wait=False, **options)
    uses = [(lease.entry, lease.use_no) for lease in leases]
    await at.ack(uses, checkpoint=f"step-{step + 1}", step=step + 1)
    return uses


def test_every_use_is_a_row_of_its_own_up_to_the_limit_and_after_the_last_one_an_entry_is_spent(world: BufferWorld):
    async def work():
        buffer = await world.start()
        [entry] = await fill(buffer, 1)
        assert await use(buffer, 2, 0, again=True) == []
        assert await use(buffer, 2, 0) == [(entry, 1)]
        assert await use(buffer, 2, 1) == []
        assert await use(buffer, 2, 1, again=True) == [(entry, 2)]
        assert await states(buffer) == {entry: "ready"}
        assert await use(buffer, 2, 2, again=True) == [(entry, 3)]
        assert await states(buffer) == {entry: "spent"}
        assert await use(buffer, 2, 3, again=True) == []
        stats = await buffer.stats()
        assert (stats["uses/acked"], stats["admitted"], stats["refunded"]) == (3, 1, 0)
        await buffer.check_conservation()

    run(work())


@pytest.mark.parametrize(("cooldown", "steps"), [(0, [0, 1, 2]), (1, [0, 2, 4]), (3, [0, 4, 8])])
def test_an_entry_rests_between_its_uses(world: BufferWorld, cooldown: int, steps: list[int]):
    async def work():
        buffer = await world.start()
        await fill(buffer, 1)
        used = [0] if await use(buffer, 1, 0) else []
        for step in range(10):
            if await use(buffer, 1, step, again=True, cooldown=cooldown):
                used.append(step)
        assert used == steps

    run(work())


def test_a_lease_that_is_not_acknowledged_yet_counts_as_a_use(world: BufferWorld):
    async def work():
        buffer = await world.start()
        [entry] = await fill(buffer, 1)
        for step in range(3):
            [lease] = await buffer.lease(1, step=step, max_uses=3, again=step > 0, cooldown=0)
            assert (lease.entry, lease.use_no) == (entry, step + 1)
            assert not await buffer.lease(1, step=step, max_uses=3, again=True)
        assert await buffer.give_back([(entry, 2)]) == 1
        [lease] = await buffer.lease(1, step=4, max_uses=3, again=True)
        assert lease.use_no == 2
        await buffer.check_conservation()

    run(work())


def test_entries_that_are_too_old_to_replay_are_passed_over_and_keep_their_slot(world: BufferWorld):
    async def work():
        buffer = await world.start()
        await publish(buffer, 0)
        [old] = await fill(buffer, 1, version=0)
        assert await use(buffer, 1, 0) == [(old, 1)]
        for step in (1, 2):
            await publish(buffer, step)
        [new] = await fill(buffer, 1, version=2)
        assert await use(buffer, 1, 1) == [(new, 1)]
        assert await use(buffer, 2, 2, again=True, max_staleness=1) == [(new, 2)]
        assert (await buffer.stats())["refunded"] == 0
        assert await use(buffer, 2, 3, again=True, max_staleness=2) == [(old, 2), (new, 3)]
        await buffer.check_conservation()

    run(work())


def test_entries_open_to_every_run_are_replayed_by_each_run_for_itself(world: BufferWorld):
    async def work():
        first, second = await world.start("r"), await world.start("s")
        group = make_group(GroupId("x", "t", "k", 0))
        entry = await first.put(group, group, buffer="side")
        for buffer in (first, second):
            assert await use(buffer, 1, 0, buffer="side") == [(entry, 1)]
            assert await use(buffer, 1, 0, buffer="side", again=True) == []
            assert await use(buffer, 1, 1, buffer="side", again=True) == [(entry, 2)]
        await first.check_conservation()

    run(work())


@pytest.mark.parametrize("is_own", [True, False])
def test_an_entry_is_used_as_often_as_the_run_allows_now_whatever_others_or_it_itself_allowed_before(
    world: BufferWorld, is_own: bool
):
    async def work():
        first = await world.start("r")
        second = first if is_own else await world.start("s")
        group = make_group(GroupId("x", "t", "k", 0))
        assert await (first.stock([group], buffer="side") if is_own else first.put(group, group, buffer="side"))
        assert len(await first.lease(1, buffer="side", step=0, max_uses=5)) == 1
        num = 1 if is_own else len(await second.lease(1, buffer="side", step=0, max_uses=2))
        for step in range(1, 5):
            num += len(await second.lease(1, buffer="side", step=step, max_uses=2, again=True))
        assert num == 2
        await first.check_conservation()

    run(work())


@pytest.mark.parametrize("own", ["r", "qwen2.5"])
def test_what_another_run_made_is_replayed_whatever_its_versions_are_called(world: BufferWorld, own: str):
    async def work():
        buffer = await world.start(own)
        for run_name in ("other", own):
            group = make_group(GroupId(run_name, "t", "k", 0), version=0)
            await buffer.put(group, group, buffer="past")
        for step in range(4):
            await publish(buffer, step)
        options: dict[str, Any] = {"buffer": "past", "max_staleness": 1, "max_uses": 3, "wait": False}
        assert len(await buffer.lease(2, step=4, **options)) == 2
        again = await buffer.lease(2, step=6, again=True, **options)
        assert [(lease.group.id.run, lease.staleness) for lease in again] == [("other", 0)]

    run(work())


def test_a_resume_takes_back_the_uses_after_its_checkpoint_and_no_others(world: BufferWorld):
    async def work():
        buffer = await world.start()
        await publish(buffer, 0)
        [entry] = await fill(buffer, 1)
        for step in range(2):
            await use(buffer, 1, step, again=step > 0)
        await buffer.lease(1, step=2, max_uses=3, again=True)
        world.crash(buffer)
        again = await world.start()
        await again.resume_at(step=1, version=0, consumed=[(entry, 1)], checkpoint="step-1", strict=True)
        assert await use(again, 1, 0) == []
        assert await use(again, 1, 1, again=True) == [(entry, 2)]
        await again.check_conservation()

    run(work())


# --------------------------------------------------------------------------------------------------- giving back


def test_what_is_given_back_as_dropped_frees_its_slot_in_one_transaction(world: BufferWorld):
    async def work():
        buffer = await world.start()
        rule = AdmissionRule(max_staleness=0, fresh=3)
        groups = [await buffer.admit(Task(key=key), rule) for key in "abc"]
        for group in groups:
            await buffer.put(make_group(group), make_group(group))
        waiting = await stays_waiting(buffer.admit_next([(Task(key=key), key) for key in "defg"], rule, after=None))
        leases = await buffer.lease(3)
        uses = [(lease.entry, lease.use_no) for lease in leases[:2]]
        assert await buffer.give_back(uses, dropped_by="flat") == 2
        assert [group.task_key for group in await waiting] == ["d", "e"]
        assert [info.reason for info in await buffer.browse(state="dropped")] == ["flat", "flat"]
        assert await buffer.give_back(uses, dropped_by="flat") == 0
        stats = await buffer.stats()
        assert (stats["refunded"], stats["refunds/dropped"], stats["uses/returned"]) == (2, 2, 2)
        assert await buffer.readmit(rule, max_retries=2) is None
        await buffer.check_conservation()

    run(work())


def test_an_entry_that_was_trained_on_before_or_is_open_to_every_run_is_not_dropped(world: BufferWorld):
    async def work():
        buffer = await world.start()
        [used] = await fill(buffer, 1)
        await use(buffer, 1, 0)
        group = make_group(GroupId("x", "t", "k", 0))
        free = await buffer.put(group, group, buffer="side")
        for lease in [
            *(await buffer.lease(1, step=1, max_uses=3, again=True)),
            *(await buffer.lease(1, buffer="side")),
        ]:
            assert await buffer.give_back([(lease.entry, lease.use_no)], dropped_by="flat") == 1
        assert await states(buffer) == {used: "ready", free: "ready"}
        await buffer.check_conservation()

    run(work())


def test_a_deterministic_run_makes_again_what_was_dropped_after_its_checkpoint(world: BufferWorld):
    async def work():
        buffer = await world.start(deterministic=True)
        rule = AdmissionRule(max_staleness=0, fresh=2)

        async def make(keys: str, version: int) -> None:
            for key in keys:
                group = await buffer.admit(Task(key=key), rule, cursor=key)
                made = make_group(group, version=version)
                await buffer.put(made, made)

        await publish(buffer, 0)
        await make("ab", 0)
        [kept, flat] = await buffer.lease(2, step=0)
        await buffer.give_back([(flat.entry, 1)], dropped_by="flat")
        await make("c", 0)
        first = [(kept.entry, 1), *((lease.entry, 1) for lease in await buffer.lease(1, step=0))]
        await publish(buffer, 1)
        await buffer.ack(first, checkpoint="step-1", step=1)
        await make("de", 1)
        [flat, _] = await buffer.lease(2, step=1)
        await buffer.give_back([(flat.entry, 1)], dropped_by="flat")
        await make("f", 1)
        world.crash(buffer)

        again = await world.start(deterministic=True)
        await again.resume_at(step=1, version=1, consumed=first, checkpoint="step-1", strict=True)
        due = []
        while group := await again.readmit(rule, max_retries=0):
            due.append(group.task_key)
            made = make_group(group, version=1)
            await again.put(made, made)
            if group.task_key == "e":  # its batch is whole: d is flat again, and only then is there room for f
                batch = await again.lease(2, step=1)
                assert keys(batch) == ["d", "e"]
                await again.give_back([(batch[0].entry, 1)], dropped_by="flat")
        assert due == ["d", "e", "f"]
        await again.check_conservation()

    run(work())


# ------------------------------------------------------------------------------------------------ stocked buffers


def answer(number: int, taskset: str = "expert") -> Any:
    return make_group(GroupId("r", taskset, f"k{number}", number), rewards=(0.0,), version=-1, source=Source.EXPERT)


def test_stocked_answers_take_no_slot_are_stored_once_and_belong_to_their_run(world: BufferWorld):
    async def work():
        buffer, other = await world.start(), await world.start("s")
        assert await buffer.stock([answer(0), answer(1)], buffer="expert") == 2
        assert await buffer.stock([answer(1), answer(2), answer(0, "more")], buffer="expert") == 2
        assert await buffer.stocked("expert") == {"expert": 3, "more": 1}
        assert (await buffer.stats())["admitted"] == 0
        assert await other.lease(1, buffer="expert", wait=False) == []
        assert keys(await buffer.lease(4, buffer="expert", order="age")) == ["k0", "k1", "k2", "k0"]
        await buffer.check_conservation()

    run(work())


def test_a_shortage_is_met_as_soon_as_a_lease_makes_it_and_ends_with_the_run(world: BufferWorld):
    async def work():
        buffer = await world.start()
        assert await buffer.shortage("expert", 3) == 3
        await buffer.stock([answer(number) for number in range(3)], buffer="expert")
        waiting = await stays_waiting(buffer.shortage("expert", 3))
        await buffer.lease(2, buffer="expert")
        assert await waiting == 2
        await buffer.stock([answer(3), answer(4)], buffer="expert")
        waiting = await stays_waiting(buffer.shortage("expert", 3))
        await buffer.finish("done")
        assert await asyncio.wait_for(waiting, 5) is None

    run(work())


def test_a_resume_keeps_answers_that_no_policy_sampled(world: BufferWorld):
    async def work():
        buffer = await world.start(deterministic=True)
        await publish(buffer, 0)
        await buffer.stock([answer(number) for number in range(3)], buffer="expert")
        taken = [(lease.entry, 1) for lease in await buffer.lease(2, buffer="expert", step=0)]
        world.crash(buffer)
        again = await world.start(deterministic=True)
        await again.resume_at(step=0, version=-1, consumed=[], checkpoint="", strict=True)
        assert [(lease.entry, 1) for lease in await again.lease(2, buffer="expert", step=0)] == taken
        assert await again.stocked("expert") == {"expert": 3}
        await again.check_conservation()

    run(work())


@pytest.mark.parametrize("own", ["r", "qwen2.5"])
def test_versions_of_another_run_say_nothing_of_the_age_of_what_it_made(world: BufferWorld, own: str):
    async def work():
        seen = {}

        def priority(candidate: Any) -> float:
            seen[candidate.entry.partition("/")[0]] = candidate.staleness
            return 0.0

        buffer = await world.start(own, priority=priority)
        for run_name in ("other", own):
            group = make_group(GroupId(run_name, "train", "a", 0), version=0)
            await buffer.put(group, group, buffer="past")
        for step in range(3):
            await publish(buffer, step)
        leases = await buffer.lease(2, buffer="past")
        assert {lease.group.id.run: lease.staleness for lease in leases} == {"other": 0, own: 2}
        assert sorted(seen.values()) == [0, 2]

    run(work())


def test_nobody_waits_on_a_buffer_that_nobody_fills(world: BufferWorld):
    async def work():
        buffer = await world.start(filled={"main", "expert"})
        group = make_group(GroupId("x", "t", "k", 0))
        await buffer.put(group, group, buffer="side")
        assert keys(await buffer.lease(3, buffer="side")) == ["k"]
        assert await buffer.lease(3, buffer="side") == []
        for name in ("main", "expert"):
            (await stays_waiting(buffer.lease(1, buffer=name))).cancel()

    run(work())
