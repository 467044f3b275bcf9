"""Sources that wait together take turns."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from triune.buffer import StoredBuffer
from triune.buffer.fairness import Turns
from triune.buffer.stores.memory import Memory
from triune.errors import StoreError
from triune.records import GroupId, Source
from triune.testing.buffers import BufferWorld, run
from triune.testing.groups import make_group


def test_turns_follow_the_weights_whatever_the_size_of_a_lease():
    turns, taken = Turns({"policy": 3.0}), Counter[str]()
    for size in (1, 2, 1, 3, 1) * 5:
        taken.update(turns.plan({"policy": ["policy"] * 9, "imported": ["imported"] * 9}, size))
        turns.commit()
    assert taken == {"policy": 30, "imported": 10}


def test_a_source_that_has_nothing_leaves_its_turns_to_others_and_saves_none_up():
    turns = Turns({})
    for _ in range(10):
        assert turns.plan({"policy": "pp"}, 2) == ["p", "p"]
        turns.commit()
    planned = turns.plan({"policy": "pppp", "imported": "iiii"}, 4)
    assert sorted(planned) == ["i", "i", "p", "p"]


def test_a_plan_that_was_not_granted_costs_no_turn():
    turns = Turns({})
    plans = [turns.plan({"a": "aa", "b": "bb"}, 1) for _ in range(2)]
    assert plans == [["a"], ["a"]]


def test_turns_that_are_taken_back_come_again():
    turns = Turns({})
    assert turns.plan({"a": "aa", "b": "bb"}, 1) == ["a"]
    take_back = turns.commit()
    assert turns.plan({"a": "aa", "b": "bb"}, 1) == ["b"]
    take_back()
    assert turns.plan({"a": "aa", "b": "bb"}, 1) == ["a"]


async def put_free(buffer: StoredBuffer, name: str, source: Source, num: int) -> None:
    for number in range(num):
        group = make_group(GroupId("x", f"{name} {source.value}", f"{number:02}", 0), source=source)
        await buffer.put(group, group, buffer=name)


def test_shares_hold_in_each_of_several_buffers_that_are_leased_in_turn(world: BufferWorld):
    async def work():
        buffer = await world.start(shares={"policy": 3, "imported": 1})
        for name, source in (("main", Source.POLICY), ("main", Source.IMPORTED), ("expert", Source.EXPERT)):
            await put_free(buffer, name, source, 40)
        seen: Counter[str] = Counter()
        for step in range(20):
            leases = await buffer.lease(2, buffer="main", step=step, wait=False)
            seen.update(lease.group.id.taskset for lease in leases)
            assert len(await buffer.lease(2, buffer="expert", step=step, wait=False)) == 2
        assert seen == {"main policy": 30, "main imported": 10}

    run(work())


def test_a_lease_whose_transaction_is_rolled_back_costs_no_turn(world: BufferWorld):
    async def fail(buffer: StoredBuffer) -> None:
        await buffer._writer.submit(lambda: buffer.store.db.execute("INSERT INTO nothing VALUES (1)"))

    async def work():
        buffer = await world.start(shares={})
        for source in (Source.IMPORTED, Source.POLICY):
            await put_free(buffer, "main", source, 4)
        first, failure = await asyncio.gather(buffer.lease(1, wait=False), fail(buffer), return_exceptions=True)
        assert isinstance(failure, StoreError)
        second = await buffer.lease(1, wait=False)
        assert [leases[0].group.id.taskset for leases in (first, second)] == ["main imported", "main policy"]

    run(work())


def test_a_lease_takes_from_every_source_that_waits_and_fills_up_from_the_others(tmp_path: Path):
    world = BufferWorld(Memory(), tmp_path)

    async def work():
        buffer = await world.start(shares={"policy": 3, "imported": 1})
        for source, num in ((Source.POLICY, 20), (Source.IMPORTED, 3)):
            for number in range(num):
                group = make_group(GroupId("r", source.value, f"{number:02}", 0), source=source)
                await buffer.put(group, group)
        seen = []
        for _ in range(3):
            leases = await buffer.lease(4)
            seen.append(Counter(lease.group.id.taskset for lease in leases))
        assert seen == [{"policy": 3, "imported": 1}] * 3
        rest = await buffer.lease(8)
        assert Counter(lease.group.id.taskset for lease in rest) == {"policy": 8}
        assert [lease.group.id.task_key for lease in rest] == [f"{n:02}" for n in range(9, 17)]
        await buffer.check_conservation()

    try:
        run(work())
    finally:
        world.end()
