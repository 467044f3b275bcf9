"""Epochs, fencing, versions and resuming (CONTRACTS C4)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from triune.errors import ConfigError, FencedError, StoreError, TaskError
from triune.ports import AdmissionRule, Refund, WeightUpdate
from triune.records import GroupId, Source, Task
from triune.testing.buffers import ROOMY, BufferWorld, fill, publish, run, states, stays_waiting
from triune.testing.groups import make_group, with_mean_advantages


def test_every_write_of_an_older_epoch_is_refused(world: BufferWorld):
    async def work():
        old = await world.start()
        [entry] = await fill(old, 1)
        group = await old.admit(Task(key="x"), ROOMY)
        version = await old.begin_version(0)
        await old.lease(1)
        new = world.open()
        assert await new.open_run("r", config_hash="", data_hash="") == 1
        update = WeightUpdate(version=version, step=0, digest="", dtype="float32")
        writes: dict[str, Callable[[], Any]] = {
            "admit": lambda: old.admit(Task(key="y"), ROOMY),
            "readmit": lambda: old.readmit(ROOMY, max_retries=2),
            "open_admissions": old.open_admissions,
            "refund": lambda: old.refund(group, Refund.INVALID),
            "put": lambda: old.put(make_group(group)),
            "revise": lambda: old.revise(entry, make_group(GroupId.parse(entry))),
            "lease": lambda: old.lease(1, wait=False),
            "renew": old.renew,
            "ack": lambda: old.ack([(entry, 1)], checkpoint="c", step=1),
            "give_back": old.give_back,
            "amend": lambda: old.amend(entry, {"reward": 1.0}, by="me", key="k"),
            "end": lambda: old.end("x"),
            "finish": lambda: old.finish("x"),
            "begin_version": lambda: old.begin_version(1),
            "commit_version": lambda: old.commit_version(update),
            "wait_version": lambda: old.wait_version(-1),
            "ack_control": lambda: old.ack_control(1, by="me"),
            "resume_at": lambda: old.resume_at(step=0, version=0, consumed=[], checkpoint="", strict=True),
        }
        refused = await asyncio.gather(*(write() for write in writes.values()), return_exceptions=True)
        assert [name for name, outcome in zip(writes, refused, strict=True) if type(outcome) is not FencedError] == []
        assert (await new.stats())["puts"] == 1
        await new.check_conservation()

    run(work())


def test_a_call_without_an_open_run_says_what_to_do_first(world: BufferWorld):
    async def work():
        with pytest.raises(StoreError, match="open_run or join_run"):
            await world.open().put(make_group(GroupId("r", "train", "a", 0)))

    run(work())


def test_joining_waits_for_a_live_incarnation_and_says_when_there_is_none(world: BufferWorld):
    async def work():
        explorer = world.open()
        with pytest.raises(StoreError, match="nobody has it open after"):
            await explorer.join_run("r", timeout_s=0.05)
        joining = await stays_waiting(explorer.join_run("r", timeout_s=5))
        trainer = await world.start()
        assert await joining == 0
        world.crash(trainer)
        world.time += 61
        again = world.open()
        joining = await stays_waiting(again.join_run("r", timeout_s=5))
        resumed = await world.start()
        await asyncio.sleep(0.05)
        assert not joining.done(), "joined before the run stood at its checkpoint"
        await resumed.resume_at(step=0, version=-1, consumed=[], checkpoint="", strict=True)
        assert await joining == 1

    run(work())


def test_case_40_another_configuration_or_other_tasks_are_refused_on_resume(world: BufferWorld):
    async def work():
        await world.open().open_run("r", config_hash="c1", data_hash="d1")
        buffer = world.open()
        with pytest.raises(ConfigError, match="c1, with which it was started"):
            await buffer.open_run("r", config_hash="c2", data_hash="d1")
        with pytest.raises(TaskError, match="d1, with which it was started"):
            await buffer.open_run("r", config_hash="c1", data_hash="d2")
        assert await buffer.open_run("r", config_hash="", data_hash="d1") == 1
        assert await buffer.open_run("r", config_hash="c3", data_hash="d1") == 2, "what was allowed to change stays so"
        with pytest.raises(ConfigError, match="configuration c1; expected c3"):
            await buffer.open_run("r", config_hash="c1", data_hash="d1")
        assert await buffer.open_run("other", config_hash="c2", data_hash="d2") == 0

    run(work())


def test_case_43_a_run_never_picks_up_what_another_run_left_in_its_own_buffer(world: BufferWorld):
    async def work():
        one = await world.start("one")
        await fill(one, 2)
        world.crash(one)
        two = await world.start("two")
        assert await two.lease(2, wait=False) == []
        assert await two.open_admissions() == []
        assert await two.cursor() is None
        assert await two.latest_version() is None

    run(work())


def test_a_named_buffer_serves_every_run_once_each(world: BufferWorld):
    async def work():
        one, two = await world.start("one"), await world.start("two")
        expert = make_group(GroupId("experts", "train", "a", 0), source=Source.EXPERT)
        await one.put(expert, expert, buffer="expert")
        for buffer in (one, two):
            assert await buffer.lease(1, wait=False) == []
            [lease] = await buffer.lease(1, buffer="expert", wait=False)
            assert await buffer.lease(1, buffer="expert", wait=False) == []
            await buffer.ack([(lease.entry, 1)], checkpoint="c", step=1)
        assert (await one.stats())["uses/acked"] == 1
        assert (await one.stats())["admitted"] == 0
        await one.check_conservation()

    run(work())


def test_version_numbers_are_never_reused_and_a_reserved_one_is_not_latest(world: BufferWorld):
    async def work():
        buffer = await world.start()
        assert await buffer.latest_version() is None
        assert await publish(buffer, 0) == 0
        assert await buffer.begin_version(1) == 1
        assert (await buffer.latest_version()).version == 0
        world.crash(buffer)
        again = await world.start()
        await again.resume_at(step=0, version=0, consumed=[], checkpoint="c0", strict=True)
        assert await publish(again, 1) == 2
        assert (await again.latest_version()).version == 2
        with pytest.raises(StoreError, match="lost"):
            await again.commit_version(WeightUpdate(version=1, step=1, digest="", dtype="float32"))
        with pytest.raises(StoreError, match="never reserved"):
            await again.commit_version(WeightUpdate(version=9, step=1, digest="", dtype="float32"))

    run(work())


def test_waiting_for_a_version_returns_the_newest(world: BufferWorld):
    async def work():
        buffer = await world.start()
        await publish(buffer, 0)
        assert (await buffer.wait_version(-1)).version == 0
        waiting = await stays_waiting(buffer.wait_version(0))
        await publish(buffer, 1)
        update = await waiting
        assert (update.version, update.step, update.digest) == (1, 1, "d")

    run(work())


def test_case_38_resuming_acknowledges_what_the_checkpoint_has_and_returns_everything_else(world: BufferWorld):
    async def work():
        buffer = await world.start()
        entries = await fill(buffer, 4)
        first = [(lease.entry, 1) for lease in await buffer.lease(2)]
        await buffer.lease(1)
        world.crash(buffer)  # between the rename of the checkpoint and its ack
        again = await world.start()
        await again.resume_at(step=1, version=0, consumed=first, checkpoint="step-1", strict=True)
        rest = await again.lease(4, wait=False)
        assert [lease.entry for lease in rest] == entries[2:]
        await again.ack([(lease.entry, lease.use_no) for lease in rest], checkpoint="step-2", step=2)
        assert set((await states(again)).values()) == {"spent"}
        await again.check_conservation()

    run(work())


def test_resuming_from_an_older_checkpoint_returns_what_later_ones_acknowledged(world: BufferWorld):
    async def work():
        buffer = await world.start()
        entries = await fill(buffer, 2)
        for step in (1, 2):
            [lease] = await buffer.lease(1)
            await buffer.ack([(lease.entry, 1)], checkpoint=f"step-{step}", step=step)
        world.crash(buffer)
        again = await world.start()
        await again.resume_at(step=1, version=0, consumed=[(entries[0], 1)], checkpoint="step-1", strict=True)
        assert [lease.entry for lease in await again.lease(2, wait=False)] == [entries[1]]
        await again.check_conservation()

    run(work())


def test_case_41_strictly_on_policy_what_lost_weights_sampled_is_dropped_and_made_again(
    world: BufferWorld,
):
    async def work():
        buffer = await world.start()
        await publish(buffer, 0)
        kept = await fill(buffer, 1, version=0)
        await publish(buffer, 1)
        lost = await fill(buffer, 2, version=1)
        before = await buffer.stats()
        await buffer.lease(2)
        world.crash(buffer)
        again = await world.start()
        await again.resume_at(step=0, version=0, consumed=[], checkpoint="c0", strict=True)
        assert [lease.entry for lease in await again.lease(3, wait=False)] == kept
        assert await again.open_admissions() == []
        reopened = [await again.readmit(ROOMY, max_retries=0) for _ in lost]
        assert [str(group) for group in reopened] == lost
        assert await again.readmit(ROOMY, max_retries=0) is None
        assert {info.reason for info in await again.browse(state="dropped")} == {"lost"}
        assert await publish(again, 1) == 2
        for group in reopened:
            raw = make_group(group, version=2)
            await again.put(raw, with_mean_advantages(raw))
        assert [lease.entry for lease in await again.lease(2)] == lost
        after = await again.stats()
        assert after["admitted"] - after["refunded"] == before["admitted"] - before["refunded"]
        assert after["refunds/lost"] == 2
        assert after["puts"] == 5
        await again.check_conservation()

    run(work())


def test_on_resume_no_more_groups_are_made_again_than_the_checkpoint_has_slots_for(world: BufferWorld):
    async def work():
        buffer = await world.start()
        rule = AdmissionRule(max_staleness=0, fresh=2)
        groups = []
        for step in range(2):
            await publish(buffer, step)
            groups += [await buffer.admit(Task(key=f"{step}{n}"), rule) for n in range(2)]
        world.crash(buffer)
        again = await world.start()
        await again.resume_at(step=0, version=0, consumed=[], checkpoint="c0", strict=True)
        assert await again.free_slots(rule) == 2
        assert [await again.readmit(rule, max_retries=0) for _ in range(2)] == groups[:2]
        assert await again.free_slots(rule) == 0
        waiting = await stays_waiting(again.readmit(rule, max_retries=0))
        await publish(again, 1)
        assert await waiting == groups[2]
        assert await again.readmit(rule, max_retries=0) == groups[3]
        await again.check_conservation()

    run(work())


def test_asynchronously_what_lost_weights_sampled_stays_with_the_checkpoint_s_age(world: BufferWorld):
    async def work():
        buffer = await world.start()
        for step in range(3):
            await publish(buffer, step)
        await fill(buffer, 1, version=2)
        world.crash(buffer)
        again = await world.start()
        await again.resume_at(step=0, version=0, consumed=[], checkpoint="c0", strict=False)
        assert (await again.browse())[0].oldest_version == 0
        await publish(again, 1)
        [lease] = await again.lease(1, max_staleness=1)
        assert lease.staleness == 1
        await again.check_conservation()

    run(work())


def test_after_losing_versions_admission_counts_from_the_surviving_line(world: BufferWorld):
    async def work():
        buffer = await world.start()
        rule = AdmissionRule(max_staleness=0, fresh=1)
        for step in range(4):
            await publish(buffer, step)
        await buffer.resume_at(step=1, version=1, consumed=[], checkpoint="c", strict=True)
        assert await publish(buffer, 2) == 4
        for key in "abc":
            assert await buffer.admit(Task(key=key), rule) is not None
        await stays_waiting(buffer.admit(Task(key="d"), rule))

    run(work())
