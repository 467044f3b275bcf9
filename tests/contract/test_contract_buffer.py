"""What every store must do (CONTRACTS C1, C3, C4, C5, C7). A new backend is one more entry in `BACKENDS`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from triune.buffer import BufferSettings, StoredBuffer, open_buffer
from triune.buffer.front import StoredBuffer as Front
from triune.buffer.stores.memory import Memory
from triune.buffer.stores.sqlite import SQLite
from triune.errors import ConfigError, FencedError, RecordError, StoreError, TaskError
from triune.ports import AdmissionRule, Refund, WeightUpdate
from triune.records import GroupId, Source, Task
from triune.testing.groups import make_group, with_mean_advantages

ROOMY = AdmissionRule(max_staleness=0, fresh=1000)
BACKENDS = {"memory": Memory(), "sqlite": SQLite()}


class World:
    """Buffers over one store; `reopen` is what a new process would see."""

    def __init__(self, store: Any, folder: Path) -> None:
        self.store, self.folder = store, folder
        self.time = 1000.0
        self.buffers: list[StoredBuffer] = []
        self._db: Any = None

    def open(self, **options: Any) -> StoredBuffer:
        """The first buffer, or another process's; the clock only moves by hand."""
        settings = BufferSettings(store=lambda folder: self._database(), lease_s=60, poll_s=0.005)
        buffer = open_buffer(settings, self.folder, **{"reshape": with_mean_advantages, **options})
        self.buffers.append(buffer)
        return buffer

    def _database(self) -> Any:
        if isinstance(self.store, Memory):
            self._db = self._db or self.store(self.folder, lambda: self.time)
            return self._db
        return self.store(self.folder, lambda: self.time)

    def crash(self, buffer: StoredBuffer) -> None:
        """The process is gone without a word."""
        buffer.abandon()

    def end(self) -> None:
        for buffer in self.buffers:
            buffer.abandon()


@pytest.fixture(params=BACKENDS)
def world(request: pytest.FixtureRequest, tmp_path: Path):
    found = World(BACKENDS[request.param], tmp_path)
    yield found
    found.end()


async def started(world: World, run: str = "r", **options: Any) -> StoredBuffer:
    buffer = world.open(**options)
    await buffer.open_run(run, config_hash="", data_hash="")
    return buffer


async def publish(buffer: StoredBuffer, step: int) -> int:
    version = await buffer.begin_version(step)
    await buffer.commit_version(WeightUpdate(version=version, step=step, digest="d", dtype="float32"))
    return version


async def filled(buffer: StoredBuffer, num: int, **options: Any) -> list[str]:
    """Admit and put `num` groups of different tasks."""
    entries = []
    for _ in range(num):
        key = f"t{int((await buffer.stats())['admitted'])}"
        group = await buffer.admit(Task(key=key), ROOMY, cursor={"at": key})
        assert group is not None
        raw = make_group(group, **options)
        entries.append(await buffer.put(raw, with_mean_advantages(raw)))
    return entries


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 30))


async def is_waiting(work: Any, seconds: float = 0.05) -> asyncio.Task[Any]:
    """Start a call and see that it does not return."""
    task = asyncio.ensure_future(work)
    await asyncio.sleep(seconds)
    assert not task.done()
    return task


async def states(buffer: StoredBuffer) -> dict[str, str]:
    return {info.entry: info.state.value for info in await buffer.browse(limit=1000)}


# ----------------------------------------------------------------------------------------- identity, put, read


def test_a_group_is_stored_raw_and_shaped_and_comes_back_the_same(world: World):
    async def work():
        buffer = await started(world)
        [entry] = await filled(buffer, 1, rewards=(1.0, 0.0, 0.5))
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


def test_visits_are_issued_by_the_store_and_count_repeats_of_a_task(world: World):
    async def work():
        buffer = await started(world)
        groups = [await buffer.admit(Task(key=key), ROOMY) for key in ("a", "b", "a", "a")]
        assert [str(group) for group in groups] == ["r/train/a/0", "r/train/b/0", "r/train/a/1", "r/train/a/2"]

    run(work())


def test_putting_the_same_group_twice_stores_it_once_and_a_late_member_is_only_counted(world: World):
    async def work():
        buffer = await started(world)
        [entry] = await filled(buffer, 1)
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


def test_a_group_of_another_group_s_records_or_two_attempts_of_a_member_is_refused(world: World):
    async def work():
        buffer = await started(world)
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


def test_without_a_shaped_revision_an_entry_is_raw_until_it_is_revised(world: World):
    async def work():
        buffer = await started(world)
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


def test_a_revision_may_drop_copy_or_repair_records(world: World):
    async def work():
        buffer = await started(world)
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


def test_a_dropped_group_is_kept_with_its_operator_and_gives_its_slot_back(world: World):
    async def work():
        buffer = await started(world)
        tight = AdmissionRule(max_staleness=0, fresh=1)
        group = await buffer.admit(Task(key="a"), tight)
        waiting = await is_waiting(buffer.admit(Task(key="b"), tight))
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


# ------------------------------------------------------------------------------------------------- admission


@pytest.mark.parametrize(("staleness", "fresh", "free"), [(0, 4, 4), (1, 4, 8), (0, 2.5, 3), (2, 1.25, 4)])
def test_admission_runs_ahead_by_the_slot_budget_and_a_published_step_frees_fresh_more(world, staleness, fresh, free):
    async def work():
        buffer = await started(world)
        rule = AdmissionRule(max_staleness=staleness, fresh=fresh)
        await publish(buffer, 0)
        taken = [await buffer.admit(Task(key=f"t{n}"), rule) for n in range(free)]
        assert None not in taken
        waiting = await is_waiting(buffer.admit(Task(key="more"), rule))
        await publish(buffer, 1)
        assert await waiting is not None

    run(work())


def test_a_slot_is_refunded_once_however_often_it_is_said(world: World):
    async def work():
        buffer = await started(world)
        rule = AdmissionRule(max_staleness=0, fresh=2)
        one, _ = [await buffer.admit(Task(key=key), rule) for key in "ab"]
        for reason in (Refund.INVALID, Refund.QUARANTINED, Refund.INVALID):
            await buffer.refund(one, reason)
        stats = await buffer.stats()
        assert stats["refunded"] == 1
        assert stats["refunds/invalid"] == 1
        assert stats["open"] == 1
        assert await buffer.admit(Task(key="c"), rule) is not None
        await is_waiting(buffer.admit(Task(key="d"), rule))
        await buffer.check_conservation()

    run(work())


def test_the_run_s_limit_ends_admission_once_no_open_group_can_still_be_refunded(world: World):
    async def work():
        buffer = await started(world)
        rule = AdmissionRule(max_staleness=5, fresh=10, limit=2)
        one, two = [await buffer.admit(Task(key=key), rule) for key in "ab"]
        waiting = await is_waiting(buffer.admit(Task(key="c"), rule))
        await buffer.refund(one, Refund.TOO_SMALL)
        three = await waiting
        assert three is not None
        waiting = await is_waiting(buffer.admit(Task(key="d"), rule))
        for group in (two, three):
            await buffer.put(make_group(group), make_group(group))
        assert await waiting is None

    run(work())


def test_the_cursor_commits_with_the_admission_and_survives(world: World):
    async def work():
        buffer = await started(world)
        assert await buffer.cursor() is None
        await buffer.admit(Task(key="a"), ROOMY, cursor={"epoch": 1, "row": [3, 4]})
        await buffer.admit(Task(key="b"), ROOMY)
        world.crash(buffer)
        again = await started(world)
        assert await again.cursor() == {"epoch": 1, "row": [3, 4]}

    run(work())


def test_open_admissions_come_back_in_ledger_order_after_a_crash_and_are_put_under_the_new_epoch(world: World):
    async def work():
        buffer = await started(world)
        groups = [await buffer.admit(Task(key=key), ROOMY) for key in "cab"]
        await buffer.put(make_group(groups[1]), make_group(groups[1]))
        world.crash(buffer)
        again = await started(world)
        assert await again.open_admissions() == [groups[0], groups[2]]
        for group in await again.open_admissions():
            await again.put(make_group(group, attempt=1), make_group(group, attempt=1))
        assert await again.open_admissions() == []
        assert [lease.entry for lease in await again.lease(3)] == [str(group) for group in groups]
        await again.check_conservation()

    run(work())


def test_open_admissions_of_a_live_process_are_left_alone_until_its_heartbeat_stops(world: World):
    async def work():
        trainer = await started(world)
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


def test_a_group_refunded_as_stale_is_admitted_again_at_most_twice_and_then_quarantined(world: World):
    async def work():
        buffer = await started(world)
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


# -------------------------------------------------------------------------------------------- lease, ack, return


def test_a_lease_waits_for_a_full_batch_and_an_entry_is_leased_once(world: World):
    async def work():
        buffer = await started(world)
        await filled(buffer, 2)
        waiting = await is_waiting(buffer.lease(3))
        await filled(buffer, 2)
        first = await waiting
        rest = await buffer.lease(3, wait=False)
        assert [len(first), len(rest)] == [3, 1]
        assert len({lease.entry for lease in (*first, *rest)}) == 4
        assert all(lease.use_no == 1 for lease in first)

    run(work())


def test_leases_go_by_priority_then_by_ledger_order(world: World):
    async def work():
        buffer = await started(world)
        groups = [await buffer.admit(Task(key=str(n)), ROOMY) for n in range(4)]
        for number in (3, 1, 0, 2):
            group = make_group(groups[number], priority=5.0 if number == 2 else 0.0)
            await buffer.put(group, group)
        assert [lease.entry for lease in await buffer.lease(4)] == [str(groups[n]) for n in (2, 0, 1, 3)]

    run(work())


def test_urgent_entries_come_first_and_on_top_of_the_batch_up_to_a_quarter(world: World):
    async def work():
        buffer = await started(world)
        ordinary = await filled(buffer, 8)
        for key in "abc":
            group = make_group(GroupId("r", "people", key, 0), source=Source.HUMAN)
            await buffer.put(group, group)
        batch = await buffer.lease(8)
        assert [lease.entry for lease in batch] == ["r/people/a/0", "r/people/b/0", *ordinary]
        assert (await buffer.stats())["admitted"] == 8
        await filled(buffer, 4)
        assert (await buffer.lease(4))[0].entry == "r/people/c/0"

    run(work())


def test_an_over_stale_entry_is_never_leased_but_refunded(world: World):
    async def work():
        buffer = await started(world)
        await publish(buffer, 0)
        old = await filled(buffer, 1, version=0)
        for step in (1, 2):
            await publish(buffer, step)
        new = await filled(buffer, 1, version=2)
        assert [lease.entry for lease in await buffer.lease(2, min_version=1, wait=False)] == new
        [info] = await buffer.browse(state="dropped")
        assert (info.entry, info.reason) == (old[0], "stale")
        assert (await buffer.stats())["refunds/stale"] == 1
        await buffer.check_conservation()

    run(work())


def test_staleness_is_counted_in_published_steps_on_the_surviving_line(world: World):
    async def work():
        buffer = await started(world)
        for step in range(3):
            await publish(buffer, step)
        [entry] = await filled(buffer, 1, version=1)
        await buffer.resume_at(step=1, version=1, consumed=[], checkpoint="c1", strict=False)
        assert await publish(buffer, 1) == 3
        assert await publish(buffer, 2) == 4
        assert await buffer.floor_version(0) == 4
        assert await buffer.floor_version(1) == 1
        [lease] = await buffer.lease(1, max_staleness=1)
        assert (lease.entry, lease.staleness) == (entry, 1)

    run(work())


def test_ack_is_idempotent_and_spends_the_entry(world: World):
    async def work():
        buffer = await started(world)
        await filled(buffer, 2)
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


def test_returned_leases_can_be_leased_again(world: World):
    async def work():
        buffer = await started(world)
        await filled(buffer, 3)
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


def test_leases_live_while_their_owner_beats_and_expire_after(world: World):
    async def work():
        owner = await started(world)
        other = world.open()
        await other.join_run("r", timeout_s=5)
        await filled(owner, 1)
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


def test_an_expired_lease_that_nobody_took_can_still_be_acknowledged(world: World):
    async def work():
        owner = await started(world)
        other = world.open()
        await other.join_run("r", timeout_s=5)
        await filled(owner, 1)
        [lease] = await owner.lease(1)
        world.time += 61
        assert await other.lease(0, wait=False) == []
        assert (await other.stats())["uses/returned"] == 1
        await owner.ack([(lease.entry, 1)], checkpoint="c", step=1)
        assert await other.lease(1, wait=False) == []
        await owner.check_conservation()

    run(work())


def test_a_deterministic_buffer_leases_in_ledger_order_whoever_finished_first(world: World):
    async def work():
        buffer = await started(world, deterministic=True)
        groups = [await buffer.admit(Task(key=str(n)), ROOMY) for n in range(4)]
        for number in (3, 1, 2):
            group = make_group(groups[number], priority=float(number))
            await buffer.put(group, group)
        waiting = await is_waiting(buffer.lease(2))
        group = make_group(groups[0])
        await buffer.put(group, group)
        assert [lease.entry for lease in await waiting] == [str(groups[0]), str(groups[1])]

    run(work())


# ------------------------------------------------------------------------------------------- ends and wake-ups


def test_case_45_the_end_of_data_wakes_every_reader_with_what_is_left(world: World):
    async def work():
        buffer = await started(world)
        await filled(buffer, 2)
        waiting = await is_waiting(buffer.lease(5))
        await buffer.end("the tasks ran out")
        assert len(await waiting) == 2
        assert await buffer.lease(5) == []

    run(work())


def test_case_46_finishing_wakes_every_explorer_and_every_version_watcher(world: World):
    async def work():
        buffer = await started(world)
        rule = AdmissionRule(max_staleness=0, fresh=1)
        await publish(buffer, 0)
        await buffer.admit(Task(key="a"), rule)
        admit = await is_waiting(buffer.admit(Task(key="b"), rule))
        version = await is_waiting(buffer.wait_version(0))
        lease = await is_waiting(buffer.lease(1))
        await buffer.finish("all steps done")
        assert await admit is None
        assert await version is None
        assert await lease == []

    run(work())


def test_closing_refuses_the_calls_that_wait(world: World):
    async def work():
        buffer = await started(world)
        lease = await is_waiting(buffer.lease(1))
        await buffer.close()
        with pytest.raises(StoreError, match="closed"):
            await lease
        world.buffers.remove(buffer)

    run(work())


def test_a_cancelled_wait_leaves_nothing_behind(world: World):
    async def work():
        buffer = await started(world)
        lease = await is_waiting(buffer.lease(1))
        lease.cancel()
        await asyncio.gather(lease, return_exceptions=True)
        assert buffer._writer.num_waiting == 0
        await filled(buffer, 1)
        assert (await buffer.stats())["uses/leased"] == 0

    run(work())


# -------------------------------------------------------------------------------------------- epochs and fencing


def test_every_write_of_an_older_epoch_is_refused(world: World):
    async def work():
        old = await started(world)
        [entry] = await filled(old, 1)
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


def test_a_call_without_an_open_run_says_what_to_do_first(world: World):
    async def work():
        with pytest.raises(StoreError, match="open_run or join_run"):
            await world.open().put(make_group(GroupId("r", "train", "a", 0)))

    run(work())


def test_joining_waits_for_a_live_incarnation_and_says_when_there_is_none(world: World):
    async def work():
        explorer = world.open()
        with pytest.raises(StoreError, match="nobody has it open after"):
            await explorer.join_run("r", timeout_s=0.05)
        joining = await is_waiting(explorer.join_run("r", timeout_s=5))
        trainer = await started(world)
        assert await joining == 0
        world.crash(trainer)
        world.time += 61
        again = world.open()
        joining = await is_waiting(again.join_run("r", timeout_s=5))
        resumed = await started(world)
        await asyncio.sleep(0.05)
        assert not joining.done(), "joined before the run stood at its checkpoint"
        await resumed.resume_at(step=0, version=-1, consumed=[], checkpoint="", strict=True)
        assert await joining == 1

    run(work())


def test_case_40_another_configuration_or_other_tasks_are_refused_on_resume(world: World):
    async def work():
        await world.open().open_run("r", config_hash="c1", data_hash="d1")
        buffer = world.open()
        with pytest.raises(ConfigError, match="c1, with which it was started"):
            await buffer.open_run("r", config_hash="c2", data_hash="d1")
        with pytest.raises(TaskError, match="d1, with which it was started"):
            await buffer.open_run("r", config_hash="c1", data_hash="d2")
        assert await buffer.open_run("r", config_hash="", data_hash="d1") == 1
        assert await buffer.open_run("other", config_hash="c2", data_hash="d2") == 0

    run(work())


def test_case_43_a_run_never_picks_up_what_another_run_left_in_its_own_buffer(world: World):
    async def work():
        one = await started(world, "one")
        await filled(one, 2)
        world.crash(one)
        two = await started(world, "two")
        assert await two.lease(2, wait=False) == []
        assert await two.open_admissions() == []
        assert await two.cursor() is None
        assert await two.latest_version() is None

    run(work())


def test_a_named_buffer_serves_every_run_once_each(world: World):
    async def work():
        one, two = await started(world, "one"), await started(world, "two")
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


# ---------------------------------------------------------------------------------------- versions and resuming


def test_version_numbers_are_never_reused_and_a_reserved_one_is_not_latest(world: World):
    async def work():
        buffer = await started(world)
        assert await buffer.latest_version() is None
        assert await publish(buffer, 0) == 0
        assert await buffer.begin_version(1) == 1
        assert (await buffer.latest_version()).version == 0
        world.crash(buffer)
        again = await started(world)
        await again.resume_at(step=0, version=0, consumed=[], checkpoint="c0", strict=True)
        assert await publish(again, 1) == 2
        assert (await again.latest_version()).version == 2
        with pytest.raises(StoreError, match="lost"):
            await again.commit_version(WeightUpdate(version=1, step=1, digest="", dtype="float32"))
        with pytest.raises(StoreError, match="never reserved"):
            await again.commit_version(WeightUpdate(version=9, step=1, digest="", dtype="float32"))

    run(work())


def test_waiting_for_a_version_returns_the_newest(world: World):
    async def work():
        buffer = await started(world)
        await publish(buffer, 0)
        assert (await buffer.wait_version(-1)).version == 0
        waiting = await is_waiting(buffer.wait_version(0))
        await publish(buffer, 1)
        update = await waiting
        assert (update.version, update.step, update.digest) == (1, 1, "d")

    run(work())


def test_case_38_resuming_acknowledges_what_the_checkpoint_has_and_returns_everything_else(world: World):
    async def work():
        buffer = await started(world)
        entries = await filled(buffer, 4)
        first = [(lease.entry, 1) for lease in await buffer.lease(2)]
        await buffer.lease(1)
        world.crash(buffer)  # between the rename of the checkpoint and its ack
        again = await started(world)
        await again.resume_at(step=1, version=0, consumed=first, checkpoint="step-1", strict=True)
        rest = await again.lease(4, wait=False)
        assert [lease.entry for lease in rest] == entries[2:]
        await again.ack([(lease.entry, lease.use_no) for lease in rest], checkpoint="step-2", step=2)
        assert set((await states(again)).values()) == {"spent"}
        await again.check_conservation()

    run(work())


def test_resuming_from_an_older_checkpoint_returns_what_later_ones_acknowledged(world: World):
    async def work():
        buffer = await started(world)
        entries = await filled(buffer, 2)
        for step in (1, 2):
            [lease] = await buffer.lease(1)
            await buffer.ack([(lease.entry, 1)], checkpoint=f"step-{step}", step=step)
        world.crash(buffer)
        again = await started(world)
        await again.resume_at(step=1, version=0, consumed=[(entries[0], 1)], checkpoint="step-1", strict=True)
        assert [lease.entry for lease in await again.lease(2, wait=False)] == [entries[1]]
        await again.check_conservation()

    run(work())


def test_case_41_strictly_on_policy_what_lost_weights_sampled_is_dropped_and_its_task_admitted_again(world: World):
    async def work():
        buffer = await started(world)
        await publish(buffer, 0)
        kept = await filled(buffer, 1, version=0)
        await publish(buffer, 1)
        lost = await filled(buffer, 2, version=1)
        before = await buffer.stats()
        await buffer.lease(2)
        world.crash(buffer)
        again = await started(world)
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


def test_on_resume_no_more_groups_are_made_again_than_the_checkpoint_has_slots_for(world: World):
    async def work():
        buffer = await started(world)
        rule = AdmissionRule(max_staleness=0, fresh=2)
        groups = []
        for step in range(2):
            await publish(buffer, step)
            groups += [await buffer.admit(Task(key=f"{step}{n}"), rule) for n in range(2)]
        world.crash(buffer)
        again = await started(world)
        await again.resume_at(step=0, version=0, consumed=[], checkpoint="c0", strict=True)
        assert await again.free_slots(rule) == 2
        assert [await again.readmit(rule, max_retries=0) for _ in range(2)] == groups[:2]
        assert await again.free_slots(rule) == 0
        waiting = await is_waiting(again.readmit(rule, max_retries=0))
        await publish(again, 1)
        assert await waiting == groups[2]
        assert await again.readmit(rule, max_retries=0) == groups[3]
        await again.check_conservation()

    run(work())


def test_asynchronously_what_lost_weights_sampled_stays_with_the_checkpoint_s_age(world: World):
    async def work():
        buffer = await started(world)
        for step in range(3):
            await publish(buffer, step)
        await filled(buffer, 1, version=2)
        world.crash(buffer)
        again = await started(world)
        await again.resume_at(step=0, version=0, consumed=[], checkpoint="c0", strict=False)
        assert (await again.browse())[0].oldest_version == 0
        await publish(again, 1)
        [lease] = await again.lease(1, max_staleness=1)
        assert lease.staleness == 1
        await again.check_conservation()

    run(work())


def test_after_losing_versions_admission_counts_from_the_surviving_line(world: World):
    async def work():
        buffer = await started(world)
        rule = AdmissionRule(max_staleness=0, fresh=1)
        for step in range(4):
            await publish(buffer, step)
        await buffer.resume_at(step=1, version=1, consumed=[], checkpoint="c", strict=True)
        assert await publish(buffer, 2) == 4
        for key in "abc":
            assert await buffer.admit(Task(key=key), rule) is not None
        await is_waiting(buffer.admit(Task(key="d"), rule))

    run(work())


# ---------------------------------------------------------------------------------------------- amendments


def test_a_late_reward_makes_a_waiting_group_ready_with_recomputed_advantages(world: World):
    async def work():
        buffer = await started(world)
        group = await buffer.admit(Task(key="a"), ROOMY)
        raw = make_group(group, rewards=(1.0, None))
        entry = await buffer.put(raw, raw)
        assert await states(buffer) == {entry: "waiting"}
        waiting = await is_waiting(buffer.lease(1))
        assert await buffer.amend(entry, {"members": {"1": {"reward": 0.0}}}, by="judge", key="k1") == "applied"
        [lease] = await waiting
        assert [row.reward for row in lease.group.experiences] == [1.0, 0.0]
        assert [float(row.advantages[-1]) for row in lease.group.experiences] == [0.5, -0.5]
        await buffer.check_conservation()

    run(work())


def test_a_group_whose_reward_never_comes_expires_and_gives_its_slot_back(world: World):
    async def work():
        buffer = await started(world)
        rule = AdmissionRule(max_staleness=0, fresh=1)
        group = await buffer.admit(Task(key="a"), rule)
        await buffer.put(make_group(group, rewards=(None,)), deadline_s=30)
        waiting = await is_waiting(buffer.admit(Task(key="b"), rule))
        world.time += 31
        assert await waiting is not None
        assert await buffer.amend(str(group), {"reward": 1.0}, by="late", key="k") == "expired"
        assert (await states(buffer))[str(group)] == "expired"
        await buffer.check_conservation()

    run(work())


def test_an_amendment_of_a_ready_entry_is_a_new_revision_idempotent_by_key(world: World):
    async def work():
        buffer = await started(world)
        [entry] = await filled(buffer, 1)
        patch = {"members": {"1": {"reward": 3.0, "tags": ["nice"], "reward_parts": {"human": 3.0}}}}
        assert [await buffer.amend(entry, patch, by="ann", key="k") for _ in range(2)] == ["applied", "applied"]
        [lease] = await buffer.lease(1)
        assert lease.revision == 2
        second = lease.group.experiences[1]
        assert second.reward == 3.0
        assert second.info == {"tags": ["nice"]}
        assert second.reward_parts == {"exact": 0.0, "human": 3.0}
        assert float(second.advantages[-1]) == 1.0
        assert [row["by"] for row in await buffer.amendments(entry)] == ["ann"]

    run(work())


def test_an_amendment_that_makes_a_group_flat_drops_it_and_refunds_its_slot(world: World):
    async def work():
        buffer = await started(world)
        [entry] = await filled(buffer, 1)
        assert await buffer.amend(entry, {"reward": 1.0}, by="ann", key="k") == "applied"
        assert await states(buffer) == {entry: "dropped"}
        assert (await buffer.stats())["refunded"] == 1
        await buffer.check_conservation()

    run(work())


def test_amending_a_leased_entry_is_deferred_and_applied_when_it_is_returned(world: World):
    async def work():
        buffer = await started(world)
        [entry] = await filled(buffer, 1)
        [lease] = await buffer.lease(1)
        patch = {"members": {"0": {"reward": 2.0}}}
        assert await buffer.amend(entry, patch, by="ann", key="k") == "deferred"
        assert (await buffer.read(entry)).experiences[0].reward == 1.0
        await buffer.give_back()
        assert await buffer.amend(entry, patch, by="ann", key="k") == "applied"
        [again] = await buffer.lease(1)
        assert again.revision > lease.revision
        assert again.group.experiences[0].reward == 2.0
        await buffer.check_conservation()

    run(work())


def test_amending_what_was_trained_reissues_only_the_amended_member_urgently_and_without_a_slot(world: World):
    async def work():
        buffer = await started(world)
        [entry] = await filled(buffer, 1)
        [lease] = await buffer.lease(1)
        patch = {"members": {"0": {"reward": 2.0}}}
        assert await buffer.amend(entry, patch, by="ann", key="deferred") == "deferred"
        await buffer.ack([(entry, lease.use_no)], checkpoint="c", step=1)
        assert await buffer.amend(entry, patch, by="ann", key="deferred") == "reissued"
        assert await buffer.amend(entry, {"members": {"1": {"reward": 1.5}}}, by="bob", key="later") == "reissued"
        before = await buffer.stats()
        made = await buffer.lease(8, wait=False)
        assert len(made) == 2
        assert before["admitted"] == 1
        assert before["puts"] == 3
        for one, member, reward in zip(made, (0, 1), (2.0, 1.5), strict=True):
            [row] = one.group.experiences
            assert (row.member, row.reward, row.source) == (member, reward, Source.HUMAN)
            assert row.parents == (f"{entry}/{member}.0/main.agent.0",)
            assert row.advantages is not None
        await buffer.ack([(one.entry, one.use_no) for one in made], checkpoint="c", step=2)
        await buffer.check_conservation()

    run(work())


def test_a_reissued_entry_expires_by_its_own_clock(world: World):
    async def work():
        buffer = await started(world)
        [entry] = await filled(buffer, 1)
        await buffer.ack([(entry, (await buffer.lease(1))[0].use_no)], checkpoint="c", step=1)
        await buffer.amend(entry, {"members": {"0": {"reward": 2.0}}}, by="ann", key="k")
        world.time += 86401
        assert await buffer.lease(4, wait=False) == []
        assert (await buffer.stats())["entries/expired"] == 1
        await buffer.check_conservation()

    run(work())


@pytest.mark.parametrize(
    "patch", [{"tokens": [1]}, {"reward": "good"}, {"reward": float("nan")}, {"members": {"x": {}}}, {"is_valid": 1}]
)
def test_an_amendment_of_what_cannot_be_amended_is_refused(world: World, patch: dict[str, Any]):
    async def work():
        buffer = await started(world)
        [entry] = await filled(buffer, 1)
        with pytest.raises(RecordError, match="amendment 'k'"):
            await buffer.amend(entry, patch, by="ann", key="k")
        assert await buffer.amendments(entry) == []

    run(work())


# ----------------------------------------------------------------------------------- steering, moving, failing


def test_a_run_is_steered_by_rows_that_say_who_asked_and_who_answered(world: World):
    async def work():
        buffer = await started(world)
        first = await buffer.steer("r", "pause", by="ann")
        second = await buffer.steer("r", "set", by="bob", fields={"trainer.learning_rate": 1e-6})
        rows = await buffer.control()
        assert [(row["id"], row["action"], row["by"]) for row in rows] == [
            (first, "pause", "ann"),
            (second, "set", "bob"),
        ]
        assert rows[1]["fields"] == {"trainer.learning_rate": 1e-6}
        await buffer.ack_control(first, by="trainer")
        assert [row["id"] for row in await buffer.control()] == [second]
        [done, _] = await buffer.control_history("r")
        assert (done["acked_by"], done["acked_at_s"], done["outcome"]) == ("trainer", 1000.0, "done")
        with pytest.raises(ConfigError, match="one of pause"):
            await buffer.steer("r", "explode", by="eve")

    run(work())


def test_exported_entries_can_be_imported_into_another_buffer(world: World, tmp_path: Path):
    async def work():
        buffer = await started(world)
        await filled(buffer, 3, rewards=(1.0, 0.0))
        assert await buffer.export_jsonl(tmp_path / "out.jsonl") == 3
        other = open_buffer(BufferSettings(store=Memory()), tmp_path)
        assert [await other.import_jsonl(tmp_path / "out.jsonl", buffer="past") for _ in range(2)] == [3, 0]
        await other.open_run("new", config_hash="", data_hash="")
        leases = await other.lease(3, buffer="past")
        for lease in leases:
            original = await buffer.read(lease.entry)
            for got, want in zip(lease.group.experiences, original.experiences, strict=True):
                np.testing.assert_array_equal(got.logprobs, want.logprobs)
                np.testing.assert_array_equal(got.streams["advantages"], want.streams["advantages"])
                assert got.replace(**_no_arrays) == want.replace(**_no_arrays)
        await other.close()
        with pytest.raises(StoreError, match="cannot be written"):
            await buffer.export_jsonl(tmp_path / "none" / "out.jsonl")

    run(work())


_no_arrays: dict[str, Any] = {
    **dict.fromkeys(("tokens", "action_mask", "logprobs", "versions")),
    "streams": {},
    "messages": (),
    "operators": (),
}


def test_one_bad_call_does_not_take_the_calls_committed_with_it(world: World):
    async def work():
        buffer = await started(world)
        groups = [await buffer.admit(Task(key=str(n)), ROOMY) for n in range(6)]
        puts = [buffer.put(make_group(group), make_group(group)) for group in groups]
        outcomes = await asyncio.gather(
            *puts[:3], buffer.ack([("no", 1)], checkpoint="", step=0), *puts[3:], return_exceptions=True
        )
        assert [isinstance(outcome, StoreError) for outcome in outcomes] == [False] * 3 + [True] + [False] * 3
        assert (await buffer.stats())["puts"] == 6
        await buffer.check_conservation()

    run(work())


def test_a_full_disk_loses_nothing_and_says_what_to_do(world: World):
    async def work():
        buffer = await started(world)
        await filled(buffer, 1)
        db = buffer.store.db
        pages = db.one("PRAGMA page_count")[0]
        db.execute(f"PRAGMA max_page_count = {pages}")
        group = await buffer.admit(Task(key="big"), ROOMY)
        big = make_group(group, answer=50_000)
        with pytest.raises(StoreError, match=r"the disk is full .* expected a writable SQLite database; free space"):
            await buffer.put(big, big)
        db.execute("PRAGMA max_page_count = 1000000")
        await buffer.check_conservation()
        assert await buffer.put(big, big) == str(group)
        assert len(await buffer.lease(2)) == 2

    run(work())


def test_the_conservation_check_finds_a_lost_entry(world: World):
    async def work():
        buffer = await started(world)
        await filled(buffer, 2)
        await buffer.lease(1)
        db = buffer.store.db
        for harm, found in (
            ("UPDATE uses SET state = 'returned'", "granted uses differ"),
            ("DELETE FROM uses", "uses granted to r"),
            ("DELETE FROM entries WHERE seq = 2", "2 puts but"),
            ("UPDATE runs SET refunded = 1", "differ from their ledger"),
        ):
            with db.transaction():
                db.execute(harm)
            with pytest.raises(StoreError, match=found):
                await buffer.check_conservation()

    run(work())


def test_a_front_is_usable_from_one_event_loop_after_another(world: World):
    buffer: Front = asyncio.run(started(world))
    [entry] = asyncio.run(filled(buffer, 1))
    assert asyncio.run(buffer.lease(1))[0].entry == entry
