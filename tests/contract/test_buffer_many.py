"""Several groups put at once: the same as one by one, in one transaction (CONTRACTS C3)."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from triune.errors import FencedError, RecordError
from triune.ports import AdmissionRule
from triune.records import GroupId, Task
from triune.testing.buffers import ROOMY, BufferWorld, run, states
from triune.testing.groups import make_group, with_mean_advantages


async def admit(buffer, *keys: str) -> list[GroupId]:
    return [await buffer.admit(Task(key=key), ROOMY) for key in keys]


def shaped(group: GroupId, **options):
    raw = make_group(group, **options)
    return raw, with_mean_advantages(raw)


def test_groups_put_together_are_stored_as_each_would_be_alone(world: BufferWorld):
    async def work():
        buffer = await world.start()
        one, two, late, flat = await admit(buffer, "a", "b", "c", "d")
        groups = [
            shaped(one, rewards=(1.0, 0.0), priority=1.0),
            shaped(two, rewards=(0.0, 1.0, 0.5), version=0, prompt=7),
            (make_group(late, rewards=(1.0, None)), None),
            (make_group(flat), None),
        ]
        entries = await buffer.put_many(groups)
        assert entries == [str(group) for group in (one, two, late, flat)]
        assert await states(buffer) == dict(zip(entries, ("ready", "ready", "waiting", "raw"), strict=True))
        infos = {info.entry: info for info in await buffer.browse()}
        assert (infos[str(one)].reward, infos[str(one)].priority, infos[str(one)].num_records) == (0.5, 1.0, 2)
        assert (infos[str(two)].reward, infos[str(two)].oldest_version, infos[str(two)].num_records) == (0.5, 0, 3)
        assert infos[str(late)].reward == 1.0
        stats = await buffer.stats()
        assert (stats["puts"], stats["open"], stats["admitted"]) == (4, 0, 4)
        got = (await buffer.read(str(two))).experiences[1]
        np.testing.assert_array_equal(got.tokens, groups[1][0].experiences[1].tokens)
        np.testing.assert_array_equal(got.advantages, np.where(got.action_mask, np.float32(0.5), 0))
        await buffer.check_conservation()

    run(work())


def test_a_group_is_stored_once_however_often_it_is_in_the_list_or_was_put_before(world: BufferWorld):
    async def work():
        buffer = await world.start()
        one, two = await admit(buffer, "a", "b")
        await buffer.put(*shaped(one))
        entries = await buffer.put_many([shaped(two), shaped(one), shaped(two), shaped(two, attempt=1)])
        assert entries == [str(two), str(one), str(two), str(two)]
        stats = await buffer.stats()
        assert (stats["puts"], stats["late"]) == (2, 1)  # another attempt is late, the same one is a repetition
        assert await states(buffer) == {str(one): "ready", str(two): "ready"}
        await buffer.check_conservation()

    run(work())


def test_one_bad_record_in_the_list_is_named_and_nothing_is_stored(world: BufferWorld):
    async def work():
        buffer = await world.start()
        one, two, three = await admit(buffer, "a", "b", "c")
        bad = make_group(two)
        bad = bad.map(lambda row: row.replace(versions=row.versions + 1))
        with pytest.raises(RecordError, match="a version outside the action mask"):
            await buffer.put_many([shaped(one), (bad, bad), shaped(three)])
        stats = await buffer.stats()
        assert (stats["puts"], stats["open"]) == (0, 3)
        await buffer.put_many([shaped(one), shaped(two), shaped(three)])
        assert (await buffer.stats())["open"] == 0

    run(work())


def test_a_member_whose_numbers_have_another_type_than_the_others_is_named(world: BufferWorld):
    async def work():
        buffer = await world.start()
        (one,) = await admit(buffer, "a")
        group = make_group(one)
        wide = group.experiences[1].replace(logprobs=group.experiences[1].logprobs.astype(np.float64))
        mixed = group.with_records([group.experiences[0], wide])
        with pytest.raises(RecordError, match="logprobs is float64; expected float32"):
            await buffer.put_many([(mixed, mixed)])
        assert (await buffer.stats())["puts"] == 0

    run(work())


def test_puts_at_the_same_time_stand_each_for_itself(world: BufferWorld):
    async def work():
        buffer = await world.start()
        one, two, three = await admit(buffer, "a", "b", "c")
        bad = make_group(two).map(lambda row: row.replace(tokens=row.tokens[:-1]))
        tight = AdmissionRule(max_staleness=0, fresh=3)
        assert await buffer.free_slots(tight) == 0
        outcomes = await asyncio.gather(
            buffer.put(*shaped(one)),
            buffer.put(bad, bad),
            buffer.put(make_group(three), dropped_by="drop_flat_groups"),
            return_exceptions=True,
        )
        assert outcomes[0] == str(one)
        assert isinstance(outcomes[1], RecordError)
        assert outcomes[2] == str(three)
        assert await states(buffer) == {str(one): "ready", str(three): "dropped"}
        assert await buffer.free_slots(tight) == 1  # of the dropped one
        await buffer.check_conservation()

    run(work())


def test_an_older_incarnation_can_put_none_of_its_groups(world: BufferWorld):
    async def work():
        old = await world.start()
        one, two = await admit(old, "a", "b")
        await world.start()
        with pytest.raises(FencedError):
            await old.put_many([shaped(one), shaped(two)])
        assert await states(old) == {}

    run(work())


def test_what_is_leased_after_groups_were_put_together_is_what_was_put_in_any_process(world: BufferWorld):
    async def work():
        buffer = await world.start()
        groups = [shaped(group, rewards=(1.0, 0.25)) for group in await admit(buffer, "a", "b", "c")]
        await buffer.put_many(groups)
        other = world.open()
        await other.join_run("r", timeout_s=5)
        leases = [*await buffer.lease(1), *await other.lease(2)]
        assert [lease.entry for lease in leases] == [str(raw.id) for raw, _ in groups]
        for lease, (_, want) in zip(leases, groups, strict=True):
            assert want is not None
            for got, row in zip(lease.group.experiences, want.experiences, strict=True):
                assert (got.id, got.reward, got.operators) == (row.id, row.reward, row.operators)
                np.testing.assert_array_equal(got.advantages, row.advantages)

    run(work())
