"""Slots and the ledger (CONTRACTS C5)."""

from __future__ import annotations

from typing import Any

import pytest

from triune.buffer import StoredBuffer
from triune.ports import AdmissionRule, Refund
from triune.records import Task
from triune.testing.buffers import ROOMY, BufferWorld, publish, run, states, stays_waiting
from triune.testing.groups import make_group


@pytest.mark.parametrize(("staleness", "fresh", "free"), [(0, 4, 4), (1, 4, 8), (0, 2.5, 3), (2, 1.25, 4)])
def test_admission_runs_ahead_by_the_slot_budget_and_a_published_step_frees_fresh_more(
    world: BufferWorld, staleness: int, fresh: float, free: int
):
    async def work():
        buffer = await world.start()
        rule = AdmissionRule(max_staleness=staleness, fresh=fresh)
        await publish(buffer, 0)
        taken = [await buffer.admit(Task(key=f"t{n}"), rule) for n in range(free)]
        assert None not in taken
        waiting = await stays_waiting(buffer.admit(Task(key="more"), rule))
        await publish(buffer, 1)
        assert await waiting is not None

    run(work())


def test_a_slot_is_refunded_once_however_often_it_is_said(world: BufferWorld):
    async def work():
        buffer = await world.start()
        rule = AdmissionRule(max_staleness=0, fresh=2)
        one, _ = [await buffer.admit(Task(key=key), rule) for key in "ab"]
        for reason in (Refund.INVALID, Refund.QUARANTINED, Refund.INVALID):
            await buffer.refund(one, reason)
        stats = await buffer.stats()
        assert stats["refunded"] == 1
        assert stats["refunds/invalid"] == 1
        assert stats["open"] == 1
        assert await buffer.admit(Task(key="c"), rule) is not None
        await stays_waiting(buffer.admit(Task(key="d"), rule))
        await buffer.check_conservation()

    run(work())


def test_the_run_s_limit_ends_admission_once_no_open_group_can_still_be_refunded(world: BufferWorld):
    async def work():
        buffer = await world.start()
        rule = AdmissionRule(max_staleness=5, fresh=10, limit=2)
        one, two = [await buffer.admit(Task(key=key), rule) for key in "ab"]
        waiting = await stays_waiting(buffer.admit(Task(key="c"), rule))
        await buffer.refund(one, Refund.TOO_SMALL)
        three = await waiting
        assert three is not None
        waiting = await stays_waiting(buffer.admit(Task(key="d"), rule))
        for group in (two, three):
            await buffer.put(make_group(group), make_group(group))
        assert await waiting is None

    run(work())


def test_the_cursor_commits_with_the_admission_and_survives(world: BufferWorld):
    async def work():
        buffer = await world.start()
        assert await buffer.cursor() is None
        await buffer.admit(Task(key="a"), ROOMY, cursor={"epoch": 1, "row": [3, 4]})
        await buffer.admit(Task(key="b"), ROOMY)
        world.crash(buffer)
        again = await world.start()
        assert await again.cursor() == {"epoch": 1, "row": [3, 4]}

    run(work())


def test_open_admissions_come_back_in_ledger_order_after_a_crash_and_are_put_under_the_new_epoch(world: BufferWorld):
    async def work():
        buffer = await world.start()
        groups = [await buffer.admit(Task(key=key), ROOMY) for key in "cab"]
        await buffer.put(make_group(groups[1]), make_group(groups[1]))
        world.crash(buffer)
        again = await world.start()
        assert await again.open_admissions() == [groups[0], groups[2]]
        for group in await again.open_admissions():
            await again.put(make_group(group, attempt=1), make_group(group, attempt=1))
        assert await again.open_admissions() == []
        assert [lease.entry for lease in await again.lease(3)] == [str(group) for group in groups]
        await again.check_conservation()

    run(work())


def test_open_admissions_of_a_live_process_are_left_alone_until_its_heartbeat_stops(world: BufferWorld):
    async def work():
        trainer = await world.start()
        one, two = world.open(), world.open()
        await one.join_run("r", timeout_s=5)
        await two.join_run("r", timeout_s=5)
        group = await one.admit(Task(key="a"), ROOMY)
        assert await two.open_admissions() == []
        assert await one.open_admissions() == [group]
        world.crash(one)
        world.time += 61
        await two.renew()
        await trainer.renew()
        assert await two.open_admissions() == [group]

    run(work())


def test_a_group_refunded_as_stale_is_admitted_again_at_most_twice_and_then_quarantined(world: BufferWorld):
    async def work():
        buffer = await world.start()
        rule = AdmissionRule(max_staleness=0, fresh=1)
        group = await buffer.admit(Task(key="a"), rule)
        for _ in range(2):
            assert await buffer.readmit(rule, max_retries=2) is None
            await buffer.refund(group, Refund.STALE)
            await buffer.put(make_group(group), dropped_by="stale")
            assert await buffer.readmit(rule, max_retries=2) == group
            assert await buffer.open_admissions() == [group]
        await buffer.refund(group, Refund.STALE)
        await buffer.put(make_group(group), dropped_by="stale")
        assert (await buffer.stats())["late"] == 0
        assert await buffer.readmit(rule, max_retries=2) is None
        stats = await buffer.stats()
        assert stats["admitted"] == 3
        assert stats["refunded"] == 3
        assert stats["refunds/quarantined"] == 1
        assert await buffer.admit(Task(key="b"), rule) is not None
        await buffer.check_conservation()

    run(work())


def test_tasks_that_are_admitted_together_are_the_first_ones_for_which_there_are_slots(world: BufferWorld):
    async def work():
        buffer = await world.start()
        rule = AdmissionRule(max_staleness=0, fresh=3)
        await publish(buffer, 0)
        tasks = [(Task(key=key), {"at": key}) for key in "abcde"]
        groups = await buffer.admit_next(tasks, rule, after=None)
        assert groups is not None
        assert [group.task_key for group in groups] == ["a", "b", "c"]
        assert await buffer.cursor() == {"at": "c"}
        waiting = await stays_waiting(buffer.admit_next(tasks[3:], rule, after={"at": "c"}))
        await publish(buffer, 1)
        assert [group.task_key for group in await waiting] == ["d", "e"]

    run(work())


def test_groups_that_are_due_again_come_before_tasks_that_are_admitted_together(world: BufferWorld):
    async def work():
        buffer = await world.start()
        await publish(buffer, 0)
        stale = await buffer.admit(Task(key="a"), ROOMY)
        assert stale is not None
        await buffer.refund(stale, Refund.STALE)
        assert await buffer.admit_next([(Task(key="b"), None)], ROOMY, after=None) == []
        assert await buffer.readmit(ROOMY, max_retries=2) == stale
        assert len(await buffer.admit_next([(Task(key="b"), None)], ROOMY, after=None) or ()) == 1

    run(work())


def test_a_finished_run_admits_nothing_also_when_a_group_is_still_due_again(world: BufferWorld):
    async def work():
        buffer = await world.start()
        stale = await buffer.admit(Task(key="a"), ROOMY)
        await buffer.refund(stale, Refund.STALE)
        await buffer.finish("all steps done")
        assert await buffer.readmit(ROOMY, max_retries=2) is None
        assert await buffer.admit_next([(Task(key="b"), {"n": 1})], ROOMY, after=None) is None

    run(work())


def test_an_explorer_that_admits_many_tasks_leaves_the_others_their_share_of_the_slots(world: BufferWorld):
    async def work():
        trainer = await world.start()
        one, other = world.open(), world.open()
        await trainer.resume_at(step=0, version=-1, consumed=[], checkpoint="", strict=True)
        for explorer in (one, other):
            await explorer.join_run("r", timeout_s=5)
        await publish(trainer, 0)
        rule = AdmissionRule(max_staleness=0, fresh=8)
        assert len(await one.admit_next([(Task(key=f"a{n}"), None) for n in range(8)], rule, after=None) or ()) == 4
        assert len(await other.admit_next([(Task(key=f"b{n}"), None) for n in range(8)], rule, after=None) or ()) == 2

    run(work())


def test_an_explorer_learns_that_another_one_drew_its_tasks_instead_of_drawing_them_twice(world: BufferWorld):
    async def work():
        buffer = await world.start()
        await publish(buffer, 0)
        await buffer.admit_next([(Task(key="a"), {"at": 1})], ROOMY, after={"at": 0})
        assert await buffer.admit_next([(Task(key="a"), {"at": 1})], ROOMY, after={"at": 0}) == []
        assert await buffer.cursor() == {"at": 1}
        assert len(await buffer.admit_next([(Task(key="b"), {"at": 2})], ROOMY, after={"at": 1}) or ()) == 1

    run(work())


def test_groups_of_an_explorer_whose_heart_stopped_are_due_again_and_what_it_puts_later_is_dropped(world: BufferWorld):
    async def work():
        trainer = await world.start()
        rule = AdmissionRule(max_staleness=0, fresh=1)
        await publish(trainer, 0)
        dead, other = world.open(), world.open()
        for explorer in (dead, other):
            await explorer.join_run("r", timeout_s=5)
        group = await dead.admit(Task(key="a"), rule)
        assert group is not None
        assert await other.readmit(rule, max_retries=2) is None
        waiting = await stays_waiting(other.admit_next([(Task(key="b"), 1)], rule, after=None))
        dead.abandon()
        world.time += 61
        await trainer.renew()
        await other.renew()
        assert await waiting == []  # a group is due, and comes first
        late = world.open()
        await late.join_run("r", timeout_s=5)
        await late.put(make_group(group), make_group(group))  # the dead one, had it only slept
        assert (await late.stats())["entries/dropped"] == 1
        assert await other.readmit(rule, max_retries=2) == group
        await other.put(make_group(group), make_group(group))
        assert [lease.entry for lease in await trainer.lease(1)] == [str(group)]
        await trainer.check_conservation()

    run(work())


def test_case_45_the_end_of_tasks_waits_for_groups_that_other_explorers_still_make(world: BufferWorld):
    async def work():
        buffer = await world.start()
        await publish(buffer, 0)
        one, two = [await buffer.admit(Task(key=key), ROOMY) for key in "ab"]
        assert one is not None
        assert two is not None
        await buffer.put(make_group(one), make_group(one))
        await buffer.end("the tasks ran out")
        waiting = await stays_waiting(buffer.lease(4))
        await buffer.refund(two, Refund.STALE)
        assert not waiting.done()
        assert await buffer.readmit(ROOMY, max_retries=2) == two
        await buffer.put(make_group(two), make_group(two))
        assert len(await waiting) == 2

    run(work())


def test_the_ledger_remembers_how_often_each_task_failed_in_a_row(world: BufferWorld):
    async def visit(buffer: Any, key: str, outcome: Refund | None) -> None:
        group = await buffer.admit(Task(key=key), ROOMY)
        if outcome is None:
            await buffer.put(make_group(group), make_group(group))
        else:
            await buffer.refund(group, outcome)

    async def work():
        buffer = await world.start()
        await publish(buffer, 0)
        for key, outcomes in {
            "poison": [Refund.INVALID, Refund.TOO_SMALL, Refund.QUARANTINED],
            "healed": [Refund.INVALID, None],
            "again": [None, Refund.INVALID, Refund.STALE],
            "good": [None, Refund.DROPPED],
        }.items():
            for outcome in outcomes:
                await visit(buffer, key, outcome)
        waits = await buffer.admit(Task(key="waits"), ROOMY)
        await buffer.put(make_group(waits, rewards=(None, 1.0)), deadline_s=1)
        world.time += 2
        await buffer.lease(1, wait=False)
        assert (await states(buffer))[str(waits)] == "expired"
        found = {("train", "poison"): 3, ("train", "again"): 1}
        assert await buffer.failures() == found
        world.crash(buffer)
        buffer = await world.start()
        await buffer.resume_at(step=0, version=0, consumed=[], checkpoint="", strict=False)
        assert await buffer.failures() == found
        assert await (await world.start("s")).failures() == {}

    run(work())


async def two_explorers(world: BufferWorld) -> tuple[StoredBuffer, StoredBuffer]:
    """The trainer's process, which explores too, and an explorer beside it."""
    one, other = await world.start(), world.open()
    await publish(one, 0)
    await other.join_run("r", timeout_s=5)
    return one, other


def test_a_late_put_does_not_take_the_place_of_a_group_that_another_explorer_makes_by_now(world: BufferWorld):
    async def work():
        one, other = await two_explorers(world)
        group = await one.admit(Task(key="a"), ROOMY)
        await one.refund(group, Refund.STALE)
        assert await other.readmit(ROOMY, max_retries=2) == group
        await one.put(make_group(group), dropped_by="stale")
        await one.put(make_group(group), make_group(group))
        assert (await one.stats())["late"] == 2
        await other.put(make_group(group, attempt=1), make_group(group, attempt=1))
        [lease] = await one.lease(1)
        assert lease.group.experiences[0].id.rollout.attempt == 1
        await one.check_conservation()

    run(work())


@pytest.mark.parametrize("is_put", [False, True])
def test_an_explorer_that_was_thought_dead_does_not_give_back_what_another_one_makes_or_made(
    world: BufferWorld, is_put: bool
):
    async def work():
        one, other = await two_explorers(world)
        group = await other.admit(Task(key="a"), ROOMY)
        world.time += 61
        await one.renew()
        assert await one.readmit(ROOMY, max_retries=2) == group
        if is_put:
            await one.put(make_group(group, attempt=1), make_group(group, attempt=1))
        await other.refund(group, Refund.INVALID)
        await other.put(make_group(group), refund=Refund.INVALID)
        if not is_put:
            await one.put(make_group(group, attempt=1), make_group(group, attempt=1))
        assert await states(one) == {str(group): "ready"}
        stats = await one.stats()
        assert (stats["refunded"], stats["late"]) == (1, 1)
        await one.check_conservation()

    run(work())


def test_a_group_that_is_kept_with_its_refund_is_due_again_when_it_was_stale(world: BufferWorld):
    async def work():
        buffer = await world.start()
        group = await buffer.admit(Task(key="a"), ROOMY)
        await buffer.put(make_group(group), refund=Refund.STALE)
        [info] = await buffer.browse()
        assert (info.state, info.reason) == ("dropped", "stale")
        assert await buffer.readmit(ROOMY, max_retries=2) == group
        await buffer.put(make_group(group, attempt=1), make_group(group, attempt=1))
        assert len(await buffer.lease(1)) == 1
        await buffer.check_conservation()

    run(work())
