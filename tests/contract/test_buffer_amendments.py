"""Late rewards and people (CONTRACTS C7)."""

from __future__ import annotations

from typing import Any

import pytest

from triune.errors import RecordError
from triune.ports import AdmissionRule, Refund
from triune.records import GroupId, Pair, Source, Task
from triune.testing.buffers import ROOMY, BufferWorld, fill, run, states, stays_waiting
from triune.testing.groups import make_group


def test_a_late_reward_makes_a_waiting_group_ready_with_recomputed_advantages(world: BufferWorld):
    async def work():
        buffer = await world.start()
        group = await buffer.admit(Task(key="a"), ROOMY)
        raw = make_group(group, rewards=(1.0, None))
        entry = await buffer.put(raw, raw)
        assert await states(buffer) == {entry: "waiting"}
        waiting = await stays_waiting(buffer.lease(1))
        assert await buffer.amend(entry, {"members": {"1": {"reward": 0.0}}}, by="judge", key="k1") == "applied"
        [lease] = await waiting
        assert [row.reward for row in lease.group.experiences] == [1.0, 0.0]
        assert [float(row.advantages[-1]) for row in lease.group.experiences] == [0.5, -0.5]
        await buffer.check_conservation()

    run(work())


def test_a_group_whose_reward_never_comes_expires_and_gives_its_slot_back(world: BufferWorld):
    async def work():
        buffer = await world.start()
        rule = AdmissionRule(max_staleness=0, fresh=1)
        group = await buffer.admit(Task(key="a"), rule)
        await buffer.put(make_group(group, rewards=(None,)), deadline_s=30)
        waiting = await stays_waiting(buffer.admit(Task(key="b"), rule))
        world.time += 31
        assert await waiting is not None
        assert await buffer.amend(str(group), {"reward": 1.0}, by="late", key="k") == "expired"
        assert (await states(buffer))[str(group)] == "expired"
        await buffer.check_conservation()

    run(work())


def test_an_amendment_of_a_ready_entry_is_a_new_revision_idempotent_by_key(world: BufferWorld):
    async def work():
        buffer = await world.start()
        [entry] = await fill(buffer, 1)
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


def test_an_amendment_that_makes_a_group_flat_drops_it_and_refunds_its_slot(world: BufferWorld):
    async def work():
        buffer = await world.start()
        [entry] = await fill(buffer, 1)
        assert await buffer.amend(entry, {"reward": 1.0}, by="ann", key="k") == "applied"
        assert await states(buffer) == {entry: "dropped"}
        assert (await buffer.stats())["refunded"] == 1
        await buffer.check_conservation()

    run(work())


def test_amending_a_leased_entry_is_deferred_and_applied_when_it_is_returned(world: BufferWorld):
    async def work():
        buffer = await world.start()
        [entry] = await fill(buffer, 1)
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


def test_a_group_that_got_its_spread_from_a_person_while_it_was_judged_flat_is_kept(world: BufferWorld):
    async def work():
        buffer = await world.start()
        group = await buffer.admit(Task(key="a"), ROOMY)
        raw = make_group(group, rewards=(0.0, 0.0))
        entry = await buffer.put(raw, raw)
        assert len(await buffer.lease(1)) == 1
        patch = {"members": {"0": {"reward": 1.0}}}
        assert await buffer.amend(entry, patch, by="ann", key="k") == "deferred"
        assert await buffer.give_back([(entry, 1)], dropped_by="flat") == 1
        [lease] = await buffer.lease(1, wait=False)
        assert [row.reward for row in lease.group.experiences] == [1.0, 0.0]
        assert await buffer.give_back([(entry, 1)], dropped_by="flat") == 1
        assert await states(buffer) == {entry: "dropped"}
        await buffer.check_conservation()

    run(work())


def test_amending_what_was_trained_reissues_only_the_amended_member_urgently_and_without_a_slot(world: BufferWorld):
    async def work():
        buffer = await world.start()
        [entry] = await fill(buffer, 1)
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


def test_a_reissued_entry_expires_by_its_own_clock(world: BufferWorld):
    async def work():
        buffer = await world.start()
        [entry] = await fill(buffer, 1)
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
def test_an_amendment_of_what_cannot_be_amended_is_refused(world: BufferWorld, patch: dict[str, Any]):
    async def work():
        buffer = await world.start()
        [entry] = await fill(buffer, 1)
        with pytest.raises(RecordError, match="amendment 'k'"):
            await buffer.amend(entry, patch, by="ann", key="k")
        assert await buffer.amendments(entry) == []

    run(work())


def test_a_key_that_was_used_for_another_entry_or_another_patch_is_refused_so_that_nothing_is_lost(world: BufferWorld):
    async def work():
        buffer = await world.start()
        one, two = await fill(buffer, 2)
        patch = {"members": {"1": {"reward": 3.0}}}
        assert await buffer.amend(one, patch, by="ann", key="k") == "applied"
        with pytest.raises(RecordError, match=f"amendment 'k' of '{two}': the key of an amendment of '{one}'"):
            await buffer.amend(two, patch, by="ann", key="k")
        with pytest.raises(RecordError, match="the key of another patch; expected the same patch, or a new key"):
            await buffer.amend(one, {"members": {"1": {"reward": 4.0}}}, by="ann", key="k")
        assert await buffer.amendments(two) == []

    run(work())


def test_a_repeated_amendment_of_a_group_that_was_made_again_since_is_still_a_repetition(world: BufferWorld):
    async def work():
        buffer = await world.start()
        group = await buffer.admit(Task(key="a"), ROOMY)
        entry = await buffer.put(make_group(group), make_group(group))
        patch = {"members": {"1": {"reward": 3.0}}}
        assert await buffer.amend(entry, patch, by="ann", key="k") == "applied"
        await buffer.refund(group, Refund.STALE)
        assert await buffer.readmit(ROOMY, max_retries=2) == group
        await buffer.put(make_group(group, attempt=1), make_group(group, attempt=1))
        assert await buffer.amend(entry, patch, by="ann", key="k") == "applied"
        assert await buffer.amendments(entry) == []

    run(work())


def test_an_amendment_of_a_pair_is_refused_with_what_to_do_whether_it_is_leased_or_not(world: BufferWorld):
    async def work():
        buffer = await world.start()
        group = make_group(GroupId("r", "pairs", "a", 0), version=-1)
        chosen, rejected = group.experiences
        await buffer.stock([group.with_records([Pair(chosen=chosen, rejected=rejected)])], buffer="pairs")
        for key in ("ready", "leased"):
            with pytest.raises(RecordError, match="an entry of pairs or texts; expected an entry of rollouts; delete"):
                await buffer.amend(str(group.id), {"reward": 1.0}, by="ann", key=key)
            await buffer.lease(1, buffer="pairs", wait=False)

    run(work())


def test_what_another_process_s_amendment_makes_anew_is_for_the_run_of_its_entry(world: BufferWorld):
    async def work():
        one, two = await world.start("one"), await world.start("two")
        [entry] = await fill(one, 1)
        [lease] = await one.lease(1)
        await one.ack([(entry, lease.use_no)], checkpoint="c", step=1)
        patch = {"members": {"0": {"reward": 2.0}}}
        await two.amend(entry, patch, by="ann", key="k")
        assert await two.lease(4, wait=False) == []
        [made] = await one.lease(4, wait=False)
        assert [row.reward for row in made.group.experiences] == [2.0]
        assert await two.amend(entry, patch, by="ann", key="k") == "reissued"

    run(work())
