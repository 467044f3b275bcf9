"""Lease, acknowledge, return; ends and wake-ups (CONTRACTS C3)."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from triune.errors import FencedError, StoreError
from triune.ports import AdmissionRule
from triune.records import GroupId, Source, Task
from triune.testing.buffers import ROOMY, BufferWorld, fill, publish, run, states, stays_waiting
from triune.testing.groups import make_group


def test_a_lease_waits_for_a_full_batch_and_an_entry_is_leased_once(world: BufferWorld):
    async def work():
        buffer = await world.start()
        await fill(buffer, 2)
        waiting = await stays_waiting(buffer.lease(3))
        await fill(buffer, 2)
        first = await waiting
        rest = await buffer.lease(3, wait=False)
        assert [len(first), len(rest)] == [3, 1]
        assert len({lease.entry for lease in (*first, *rest)}) == 4
        assert all(lease.use_no == 1 for lease in first)

    run(work())


def test_leases_go_by_priority_then_by_ledger_order(world: BufferWorld):
    async def work():
        buffer = await world.start()
        groups = [await buffer.admit(Task(key=str(n)), ROOMY) for n in range(4)]
        for number in (3, 1, 0, 2):
            group = make_group(groups[number], priority=5.0 if number == 2 else 0.0)
            await buffer.put(group, group)
        assert [lease.entry for lease in await buffer.lease(4)] == [str(groups[n]) for n in (2, 0, 1, 3)]

    run(work())


def test_urgent_entries_come_first_and_on_top_of_the_batch_up_to_a_quarter(world: BufferWorld):
    async def work():
        buffer = await world.start()
        ordinary = await fill(buffer, 8)
        for key in "abc":
            group = make_group(GroupId("r", "people", key, 0), source=Source.HUMAN)
            await buffer.put(group, group)
        batch = await buffer.lease(8)
        assert [lease.entry for lease in batch] == ["r/people/a/0", "r/people/b/0", *ordinary]
        assert (await buffer.stats())["admitted"] == 8
        await fill(buffer, 4)
        assert (await buffer.lease(4))[0].entry == "r/people/c/0"

    run(work())


def test_urgent_entries_of_one_step_are_bounded_however_many_calls_lease_it(world: BufferWorld):
    async def work():
        buffer = await world.start()
        await fill(buffer, 24)
        for key in "abcde":
            group = make_group(GroupId("r", "people", key, 0), source=Source.HUMAN)
            await buffer.put(group, group)

        async def urgent(num: int, step: int, name: str = "main") -> int:
            leases = await buffer.lease(num, step=step, buffer=name, wait=False)
            assert len(leases) == (num if name == "main" else 0) + sum(lease.is_urgent for lease in leases)
            return sum(lease.is_urgent for lease in leases)

        assert [await urgent(8, 0), await urgent(4, 0), await urgent(0, 0)] == [2, 0, 0]
        assert [await urgent(1, 1), await urgent(8, 1)] == [1, 1]
        human = make_group(GroupId("r", "people", "side", 0), source=Source.HUMAN)
        await buffer.put(human, human, buffer="side")
        assert [await urgent(1, 2), await urgent(1, 2, "side"), await urgent(1, 3, "side")] == [1, 0, 1]
        assert await buffer.give_back() == 28
        assert await urgent(8, 3) == 2, "what was given back does not count"

    run(work())


def test_an_over_stale_entry_is_never_leased_but_refunded(world: BufferWorld):
    async def work():
        buffer = await world.start()
        await publish(buffer, 0)
        old = await fill(buffer, 1, version=0)
        for step in (1, 2):
            await publish(buffer, step)
        new = await fill(buffer, 1, version=2)
        assert [lease.entry for lease in await buffer.lease(2, min_version=1, wait=False)] == new
        [info] = await buffer.browse(state="dropped")
        assert (info.entry, info.reason) == (old[0], "stale")
        assert (await buffer.stats())["refunds/stale"] == 1
        await buffer.check_conservation()

    run(work())


def test_staleness_is_counted_in_published_steps_on_the_surviving_line(world: BufferWorld):
    async def work():
        buffer = await world.start()
        for step in range(3):
            await publish(buffer, step)
        [entry] = await fill(buffer, 1, version=1)
        await buffer.resume_at(step=1, version=1, consumed=[], checkpoint="c1", strict=False)
        assert await publish(buffer, 1) == 3
        assert await publish(buffer, 2) == 4
        assert await buffer.floor_version(0) == 4
        assert await buffer.floor_version(1) == 1
        [lease] = await buffer.lease(1, max_staleness=1)
        assert (lease.entry, lease.staleness) == (entry, 1)

    run(work())


def test_ack_is_idempotent_and_spends_the_entry(world: BufferWorld):
    async def work():
        buffer = await world.start()
        await fill(buffer, 2)
        uses = [(lease.entry, lease.use_no) for lease in await buffer.lease(2)]
        for _ in range(2):
            await buffer.ack(uses, checkpoint="step-1", step=1)
        stats = await buffer.stats()
        assert stats["uses/acked"] == 2
        assert stats["entries/spent"] == 2
        assert await buffer.lease(1, wait=False) == []
        with pytest.raises(StoreError, match="never granted"):
            await buffer.ack([(uses[0][0], 2)], checkpoint="step-1", step=1)
        with pytest.raises(StoreError, match="not in"):
            await buffer.ack([("r/train/none/0", 1)], checkpoint="step-1", step=1)
        await buffer.check_conservation()

    run(work())


def test_returned_leases_can_be_leased_again(world: BufferWorld):
    async def work():
        buffer = await world.start()
        await fill(buffer, 3)
        leases = await buffer.lease(3)
        assert await buffer.give_back([(leases[0].entry, 1)]) == 1
        assert await buffer.give_back([(leases[0].entry, 1)]) == 0
        [again] = await buffer.lease(1)
        assert (again.entry, again.use_no) == (leases[0].entry, 1)
        np.testing.assert_array_equal(again.group.experiences[0].advantages, leases[0].group.experiences[0].advantages)
        assert await buffer.give_back() == 3
        assert (await buffer.stats())["uses/returned"] == 4
        await buffer.check_conservation()

    run(work())


def test_leases_live_while_their_owner_beats_and_expire_after(world: BufferWorld):
    async def work():
        owner = await world.start()
        other = world.open()
        await other.join_run("r", timeout_s=5)
        await fill(owner, 1)
        [lease] = await owner.lease(1)
        for _ in range(3):
            world.time += 40
            await owner.renew()
            assert await other.lease(1, wait=False) == []
        world.time += 61
        [stolen] = await other.lease(1, wait=False)
        assert stolen.entry == lease.entry
        with pytest.raises(FencedError, match="expired"):
            await owner.ack([(lease.entry, 1)], checkpoint="c", step=1)
        await other.ack([(lease.entry, 1)], checkpoint="c", step=1)
        await other.check_conservation()

    run(work())


def test_case_38_a_machine_that_slept_does_not_train_twice_on_what_it_holds(world: BufferWorld):
    async def work():
        trainer = await world.start()
        explorer = world.open()
        await explorer.join_run("r", timeout_s=5)
        await fill(trainer, 2)
        [lease] = await trainer.lease(1)
        world.time += 3600  # all processes were suspended: nobody has beaten, nobody is dead
        waiting = await stays_waiting(explorer.admit(Task(key="x"), AdmissionRule(max_staleness=0, fresh=1)))
        again = await trainer.lease(2, wait=False)
        assert [other.entry for other in again] == ["r/train/t1/0"]
        await trainer.ack([(lease.entry, 1), (again[0].entry, 1)], checkpoint="c", step=2)
        assert (await trainer.stats())["uses/returned"] == 0
        await trainer.check_conservation()
        await trainer.finish("done")
        assert await waiting is None

    run(work())


def test_an_expired_lease_that_nobody_took_can_still_be_acknowledged(world: BufferWorld):
    async def work():
        owner = await world.start()
        other = world.open()
        await other.join_run("r", timeout_s=5)
        await fill(owner, 1)
        [lease] = await owner.lease(1)
        world.time += 61
        assert await other.lease(0, wait=False) == []
        assert (await other.stats())["uses/returned"] == 1
        await owner.ack([(lease.entry, 1)], checkpoint="c", step=1)
        assert await other.lease(1, wait=False) == []
        await owner.check_conservation()

    run(work())


async def held_too_long(world: BufferWorld) -> tuple[Any, Any, str]:
    """A process whose lease expired, a live one of the same run, and the entry."""
    late, live = await world.start(), world.open()
    await publish(late, 0)
    await live.join_run("r", timeout_s=5)
    [entry] = await fill(late, 1)
    assert len(await late.lease(1)) == 1
    world.time += 61
    await live.renew()
    return late, live, entry


def test_a_use_that_another_process_took_and_acknowledged_is_refused_to_who_was_late(world: BufferWorld):
    async def work():
        late, live, entry = await held_too_long(world)
        assert len(await live.lease(1, wait=False)) == 1
        for _ in range(2):
            await live.ack([(entry, 1)], checkpoint="live", step=1)
        with pytest.raises(FencedError, match="expired and another process took it"):
            await late.ack([(entry, 1)], checkpoint="late", step=1)
        await live.check_conservation()

    run(work())


def test_nobody_gives_back_the_lease_of_another_process(world: BufferWorld):
    async def work():
        late, live, entry = await held_too_long(world)
        assert len(await live.lease(1, wait=False)) == 1
        assert await late.give_back([(entry, 1)], dropped_by="flat") == 0
        assert await states(live) == {entry: "ready"}
        await live.ack([(entry, 1)], checkpoint="live", step=1)
        await live.check_conservation()

    run(work())


def test_an_entry_that_was_dropped_after_its_lease_expired_cannot_be_acknowledged(world: BufferWorld):
    async def work():
        late, live, entry = await held_too_long(world)
        for step in (1, 2):
            await publish(late, step)
        assert await live.lease(1, wait=False, max_staleness=0) == []
        with pytest.raises(FencedError, match="expired and its entry is dropped since"):
            await late.ack([(entry, 1)], checkpoint="late", step=1)
        await live.check_conservation()
        again = await world.start()  # its checkpoint was written all the same, and is gone on from
        await again.resume_at(step=1, version=2, consumed=[(entry, 1)], checkpoint="late", strict=False)
        assert await states(again) == {entry: "dropped"}
        await again.check_conservation()

    run(work())


def test_a_deterministic_buffer_leases_in_ledger_order_whoever_finished_first(world: BufferWorld):
    async def work():
        buffer = await world.start(deterministic=True)
        groups = [await buffer.admit(Task(key=str(n)), ROOMY) for n in range(4)]
        for number in (3, 1, 2):
            group = make_group(groups[number], priority=float(number))
            await buffer.put(group, group)
        waiting = await stays_waiting(buffer.lease(2))
        group = make_group(groups[0])
        await buffer.put(group, group)
        assert [lease.entry for lease in await waiting] == [str(groups[0]), str(groups[1])]

    run(work())


def test_case_45_the_end_of_data_wakes_every_reader_with_what_is_left(world: BufferWorld):
    async def work():
        buffer = await world.start()
        await fill(buffer, 2)
        waiting = await stays_waiting(buffer.lease(5))
        await buffer.end("the tasks ran out")
        assert len(await waiting) == 2
        assert await buffer.lease(5) == []

    run(work())


def test_case_46_finishing_wakes_every_explorer_and_every_version_watcher(world: BufferWorld):
    async def work():
        buffer = await world.start()
        rule = AdmissionRule(max_staleness=0, fresh=1)
        await publish(buffer, 0)
        await buffer.admit(Task(key="a"), rule)
        admit = await stays_waiting(buffer.admit(Task(key="b"), rule))
        version = await stays_waiting(buffer.wait_version(0))
        lease = await stays_waiting(buffer.lease(1))
        await buffer.finish("all steps done")
        assert await admit is None
        assert await version is None
        assert await lease == []

    run(work())


def test_closing_refuses_the_calls_that_wait(world: BufferWorld):
    async def work():
        buffer = await world.start()
        lease = await stays_waiting(buffer.lease(1))
        for _ in range(2):
            await buffer.close()
        with pytest.raises(StoreError, match="closed"):
            await lease

    run(work())


def test_a_cancelled_wait_leaves_nothing_behind(world: BufferWorld):
    async def work():
        buffer = await world.start()
        lease = await stays_waiting(buffer.lease(1))
        lease.cancel()
        await asyncio.gather(lease, return_exceptions=True)
        assert buffer._writer.num_waiting == 0
        await fill(buffer, 1)
        assert (await buffer.stats())["uses/leased"] == 0

    run(work())


def test_a_lease_that_is_cancelled_while_it_commits_is_given_back(world: BufferWorld):
    async def work():
        buffer = await world.start()
        [entry] = await fill(buffer, 1)
        may_go_on, reached = threading.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def hold() -> None:
            loop.call_soon_threadsafe(reached.set)
            may_go_on.wait(10)

        lease = asyncio.ensure_future(buffer.lease(1))
        await asyncio.sleep(0)
        holding = buffer._writer.submit(hold)  # in the transaction of the lease
        await reached.wait()
        lease.cancel()
        await asyncio.gather(lease, return_exceptions=True)
        may_go_on.set()
        await holding
        async with asyncio.timeout(5):
            while (await buffer.stats())["uses/returned"] == 0:
                await asyncio.sleep(0.01)
        assert [again.entry for again in await buffer.lease(1, wait=False)] == [entry]
        await buffer.check_conservation()

    run(work())
