"""Identity, put, read and revise (CONTRACTS C1–C3)."""

from __future__ import annotations

import numpy as np
import pytest

from triune.errors import RecordError
from triune.ports import AdmissionRule, Refund
from triune.records import GroupId, Source, Task
from triune.testing.buffers import ROOMY, BufferWorld, fill, publish, run, states, stays_waiting
from triune.testing.groups import make_group, with_mean_advantages


def test_a_group_is_stored_raw_and_shaped_and_comes_back_the_same(world: BufferWorld):
    async def work():
        buffer = await world.start()
        [entry] = await fill(buffer, 1, rewards=(1.0, 0.0, 0.5))
        raw, shaped = await buffer.read(entry, revision=0), await buffer.read(entry)
        expected = make_group(raw.id, rewards=(1.0, 0.0, 0.5))
        for got, want in zip(raw.experiences, expected.experiences, strict=True):
            assert got.id == want.id
            assert got.reward == want.reward
            assert got.turns == want.turns
            np.testing.assert_array_equal(got.tokens, want.tokens)
            np.testing.assert_array_equal(got.logprobs, want.logprobs)
            assert got.advantages is None
        for got, credit in zip(shaped.experiences, (0.5, -0.5, 0.0), strict=True):
            np.testing.assert_array_equal(got.advantages, np.where(got.action_mask, np.float32(credit), 0))
            assert got.operators == ("advantage",)
            assert got.advantages.dtype == np.float32
        assert entry == str(raw.id) == "r/train/t0/0"

    run(work())


def test_visits_are_issued_by_the_store_and_count_repeats_of_a_task(world: BufferWorld):
    async def work():
        buffer = await world.start()
        groups = [await buffer.admit(Task(key=key), ROOMY) for key in ("a", "b", "a", "a")]
        assert [str(group) for group in groups] == ["r/train/a/0", "r/train/b/0", "r/train/a/1", "r/train/a/2"]

    run(work())


@pytest.mark.parametrize(
    ("priority", "message"),
    [
        (float("nan"), r"a/0/0\.0/main.agent.0: priority is nan; expected a finite number"),
        (float("inf"), r"a/0/0\.0/main.agent.0: priority is inf; expected a finite number"),
        (float("-inf"), r"a/0/0\.0/main.agent.0: priority is -inf; expected a finite number"),
        (1.7e308, "r/train/a/0: priorities whose sum is not finite; expected smaller numbers"),
    ],
    ids=str,
)
def test_a_priority_that_is_no_finite_number_is_refused_by_its_experience_and_nothing_is_stored(
    world: BufferWorld, priority: float, message: str
):
    async def work():
        buffer = await world.start()
        raw = make_group(await buffer.admit(Task(key="a"), ROOMY))
        bad = raw.map(lambda row: row.replace(priority=priority))
        for raws, shaped in ((bad, bad), (raw, bad)):
            with pytest.raises(RecordError, match=message):
                await buffer.put(raws, shaped)
        assert (await buffer.stats())["puts"] == 0

    run(work())


def test_putting_the_same_group_twice_stores_it_once_and_a_late_member_is_only_counted(world: BufferWorld):
    async def work():
        buffer = await world.start()
        [entry] = await fill(buffer, 1)
        group = GroupId.parse(entry)
        assert await buffer.put(make_group(group), make_group(group)) == entry
        assert (await buffer.stats())["late"] == 0
        assert await buffer.put(make_group(group, rewards=(1.0, 0.0, 1.0), attempt=1)) == entry
        stats = await buffer.stats()
        assert stats["puts"] == 1
        assert stats["late"] == 1
        assert len(await buffer.read(entry)) == 2
        await buffer.check_conservation()

    run(work())


def test_a_group_of_another_group_s_records_or_two_attempts_of_a_member_is_refused(world: BufferWorld):
    async def work():
        buffer = await world.start()
        one, other = GroupId("r", "train", "a", 0), GroupId("r", "train", "b", 0)
        with pytest.raises(RecordError, match="of that group"):
            await buffer.put(make_group(one).with_records(make_group(other).records))
        twice = (*make_group(one).records, *make_group(one, attempt=1).records)
        with pytest.raises(RecordError, match="two attempts"):
            await buffer.put(make_group(one).with_records(twice))
        with pytest.raises(RecordError, match="at least one"):
            await buffer.put(make_group(one, rewards=()))
        assert (await buffer.stats())["puts"] == 0

    run(work())


def test_without_a_shaped_revision_an_entry_is_raw_until_it_is_revised(world: BufferWorld):
    async def work():
        buffer = await world.start()
        group = await buffer.admit(Task(key="a"), ROOMY)
        raw = make_group(group)
        entry = await buffer.put(raw)
        assert await states(buffer) == {entry: "raw"}
        assert await buffer.lease(1, wait=False) == []
        assert await buffer.revise(entry, with_mean_advantages(raw), operators=["advantage"]) == 1
        [lease] = await buffer.lease(1, wait=False)
        assert lease.revision == 1
        assert lease.group.experiences[0].advantages is not None

    run(work())


def test_a_revision_may_drop_copy_or_repair_records(world: BufferWorld):
    async def work():
        buffer = await world.start()
        group = await buffer.admit(Task(key="a"), ROOMY)
        raw = make_group(group, rewards=(1.0, 0.0, 0.5))
        entry = await buffer.put(raw, raw)
        one = raw.experiences[2]
        mask = one.action_mask.copy()
        mask[-1] = False
        masked = one.replace(
            action_mask=mask,
            logprobs=np.where(mask, one.logprobs, np.nan).astype(np.float32),
            versions=np.where(mask, one.versions, -1).astype(np.int32),
            turns=(),
            info={"why": "truncated"},
        )
        await buffer.revise(entry, raw.with_records([masked, raw.experiences[0]]), operators=["mask"])
        got = await buffer.read(entry)
        assert [row.member for row in got.experiences] == [2, 0]
        np.testing.assert_array_equal(got.experiences[0].action_mask, mask)
        assert got.experiences[0].info == {"why": "truncated"}
        assert got.experiences[0].turns == ()
        repaired = one.replace(tokens=one.tokens + 1, source=Source.REPAIRED, parents=(str(one.id),), messages=())
        await buffer.revise(entry, raw.with_records([repaired]), operators=["repair"])
        got = await buffer.read(entry)
        np.testing.assert_array_equal(got.experiences[0].tokens, one.tokens + 1)
        assert got.experiences[0].source is Source.REPAIRED
        assert got.experiences[0].messages == ()
        assert len(await buffer.read(entry, revision=0)) == 3

    run(work())


def test_a_dropped_group_is_kept_with_its_operator_and_gives_its_slot_back(world: BufferWorld):
    async def work():
        buffer = await world.start()
        tight = AdmissionRule(max_staleness=0, fresh=1)
        group = await buffer.admit(Task(key="a"), tight)
        waiting = await stays_waiting(buffer.admit(Task(key="b"), tight))
        entry = await buffer.put(make_group(group, rewards=(1.0, 1.0)), dropped_by="drop_flat_groups")
        assert str(await waiting) == "r/train/b/0"
        [info] = await buffer.browse()
        assert (info.entry, info.state, info.reason) == (entry, "dropped", "drop_flat_groups")
        stats = await buffer.stats()
        assert stats["admitted"] == 2
        assert stats["refunded"] == 1
        assert stats["refunds/dropped"] == 1
        assert await buffer.lease(1, wait=False) == []
        await buffer.check_conservation()

    run(work())


@pytest.mark.parametrize("is_late", [False, True])
def test_what_is_leased_is_what_is_stored_and_not_what_this_process_once_put_under_the_name(
    world: BufferWorld, is_late: bool
):
    async def work():
        one, other = await world.start(), world.open()
        await publish(one, 0)
        await other.join_run("r", timeout_s=5)
        group = await one.admit(Task(key="a"), ROOMY)
        old, new = make_group(group, version=0), make_group(group, version=2, attempt=1)
        if is_late:
            await one.refund(group, Refund.STALE)
        await one.put(old, old)
        for step in (1, 2):
            await publish(one, step)
        assert await one.lease(1, max_staleness=0, wait=False) == []
        assert await other.readmit(ROOMY, max_retries=2) == group
        await other.put(new, new)
        [lease] = await one.lease(1, max_staleness=0, wait=False)
        assert {int(row.versions.max()) for row in lease.group.experiences} == {2}

    run(work())
