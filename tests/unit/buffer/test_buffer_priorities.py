"""Priorities: what each brick puts first, when it is asked, and that nobody's code can harm a lease."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from triune.buffer import BufferSettings, Candidate
from triune.buffer.choosing import _PASSES, _select
from triune.buffer.stores.memory import Memory
from triune.errors import ConfigError, PluginError
from triune.records import Task
from triune.registry import build, names
from triune.testing.buffers import ROOMY, BufferWorld, fill, publish, put_group, run, states
from triune.testing.bulk import insert_entries
from triune.testing.groups import make_group

PLAIN = Candidate(
    entry="r/train/a/0", priority=2.0, reward=0.5, advantage=0.25, staleness=3, uses=1, task_uses=1, source="policy",
    num_records=2, waited_s=10.0, step=1,
)  # fmt: skip


def keys(leases: Any) -> str:
    return "".join(lease.group.id.task_key for lease in leases)


# ------------------------------------------------------------------------------------------------------ bricks


@pytest.mark.parametrize(
    ("spec", "score"),
    [
        ("linear_decay", 2.0 - 3 - 1),
        ({"use": "linear_decay", "per_version": 0.5, "per_use": 0.25}, 2.0 - 1.5 - 0.25),
        ({"use": "reward_weighted", "weight": 4, "per_version": 0.1}, 2.0 + 2.0 - 0.3),
        ({"use": "advantage_weighted", "weight": 4}, 2.0 + 1.0),
        ({"use": "novelty", "bonus": 3}, 2.0 + 1.5),
    ],
)
def test_a_priority_says_what_its_formula_says(spec: Any, score: float):
    assert build("priority", spec, "buffer.priority")(PLAIN) == pytest.approx(score)


def test_an_unknown_reward_or_advantage_counts_as_none_earned():
    unknown = PLAIN._replace(reward=None, advantage=None)
    assert [build("priority", use, "")(unknown) for use in ("reward_weighted", "advantage_weighted")] == [2.0, 2.0]


def test_a_random_decay_draws_in_proportion_to_the_exponential_of_the_score_and_the_same_for_the_same_seed():
    draw = build("priority", {"use": "decay_random", "temperature": 0.5}, "")
    ahead = 0
    for number in range(4000):
        low = draw(PLAIN._replace(entry=f"low{number}", priority=0.0))
        ahead += draw(PLAIN._replace(entry=f"high{number}", priority=0.5)) > low
    assert ahead / 4000 == pytest.approx(math.e / (1 + math.e), abs=0.02)
    assert draw(PLAIN) == draw(PLAIN)
    other = build("priority", {"use": "decay_random", "temperature": 0.5, "seed": 1}, "")
    assert len({draw(PLAIN), other(PLAIN), draw(PLAIN._replace(step=2))}) == 3


def test_every_priority_of_the_house_is_listed_and_names_orders_that_there_are():
    assert names("priority") == ["advantage_weighted", "decay_random", "linear_decay", "novelty", "reward_weighted"]
    for name in names("priority"):
        assert math.isfinite(build("priority", name, "")(PLAIN))
        BufferWorld(Memory(), Path()).open(priority=build("priority", name, "")).abandon()


# ------------------------------------------------------------------------------------------------- in a buffer


def test_linear_decay_lets_an_old_entry_go_first_as_long_as_its_priority_is_worth_its_age(world: BufferWorld):
    async def work():
        buffer = await world.start(priority=build("priority", "linear_decay", ""))
        for step in range(4):
            await publish(buffer, step)
        await put_group(buffer, "a", version=0)
        await put_group(buffer, "b", version=3)
        await put_group(buffer, "c", version=1, priority=2.5)
        await put_group(buffer, "d", version=2)
        assert keys(await buffer.lease(4)) == "cbda"

    run(work())


def test_a_priority_is_asked_at_the_lease_and_not_at_the_put(world: BufferWorld):
    async def work():
        buffer = await world.start(priority=lambda candidate: wanted == candidate.entry.split("/")[2])
        for key in "abc":
            await put_group(buffer, key)
        wanted = "c"
        assert keys(await buffer.lease(1)) == "c"
        wanted = "b"
        assert keys(await buffer.lease(2)) == "ba"

    run(work())


def test_novelty_counts_how_often_a_task_was_leased_and_forgets_what_was_given_back(world: BufferWorld):
    async def work():
        buffer = await world.start(priority=build("priority", "novelty", ""))
        for key in ("a", "a", "b"):
            await put_group(buffer, key)
        first = await buffer.lease(1)
        assert keys(first) == "a"
        second = await buffer.lease(1)
        assert keys(second) == "b", "the second entry of `a` is of a task that was trained on"
        await buffer.give_back([(second[0].entry, 1)])
        await buffer.ack([(first[0].entry, 1)], checkpoint="c", step=1)
        assert keys(await buffer.lease(2)) == "ba"
        await buffer.check_conservation()

    run(work())


def test_advantages_are_kept_with_an_entry_and_follow_its_amendments(world: BufferWorld):
    async def work():
        buffer = await world.start(priority=lambda candidate: seen.append(candidate) or 0.0)
        seen: list[Candidate] = []
        [entry] = await fill(buffer, 1, rewards=(1.0, 0.0))
        await put_group(buffer, "none", rewards=(1.0, 0.0))
        await buffer.lease(2)
        assert {one.entry: one.advantage for one in seen} == {entry: 0.5, "r/train/none/0": None}
        await buffer.give_back()
        seen.clear()
        await buffer.amend(entry, {"members": {"0": {"reward": 3.0}}}, by="judge", key="k")
        await buffer.lease(2)
        assert {one.entry: one.advantage for one in seen}[entry] == 1.5

    run(work())


def test_a_priority_sees_uses_staleness_and_time(world: BufferWorld):
    async def work():
        buffer = await world.start(priority=lambda candidate: seen.append(candidate) or 0.0)
        seen: list[Candidate] = []
        await publish(buffer, 0)
        await put_group(buffer, "a", version=0, priority=0.5)
        await publish(buffer, 1)
        [lease] = await buffer.lease(1, step=0, max_uses=2)
        await buffer.ack([(lease.entry, 1)], checkpoint="c", step=1)
        world.time += 30
        await buffer.lease(1, step=1, max_uses=2, again=True)
        new, old = seen
        assert (new.uses, new.task_uses, new.step, new.waited_s) == (0, 0, 1, 0.0)
        assert (old.uses, old.task_uses, old.step, old.waited_s, old.staleness) == (1, 1, 2, 30.0, 1)
        assert old.priority == 0.5

    run(work())


def test_entries_open_to_every_run_are_ranked_among_those_of_the_run(world: BufferWorld):
    async def work():
        buffer = await world.start(priority=lambda candidate: candidate.reward)
        for number, reward in enumerate((0.1, 0.9, 0.5)):
            group = make_group(await buffer.admit(Task(key=str(number)), ROOMY), rewards=(reward,))
            if number == 1:
                await buffer.put(group, group, buffer="side")
            else:
                await buffer.stock([group], buffer="side")
        assert keys(await buffer.lease(3, buffer="side")) == "120"

    run(work())


@pytest.mark.parametrize("window", ["priority", "age", "newest", "reward", "advantage"])
def test_among_many_that_wait_a_priority_finds_what_is_first_in_a_window_it_names(world: BufferWorld, window: str):
    def wanted(candidate: Candidate) -> float:
        return candidate.entry == target

    wanted.windows = (window,)

    async def work():
        nonlocal target
        buffer = await world.start(priority=wanted)
        await publish(buffer, 0)
        with buffer.store.db.transaction():
            insert_entries(buffer.store.db, "r", 0, 2000)
            column, sign = {
                "priority": ("score", ""), "age": ("ledger", "-"), "newest": ("oldest_version", ""),
                "reward": ("reward", ""), "advantage": ("advantage", ""),
            }[window]  # fmt: skip
            buffer.store.db.execute(f"UPDATE entries SET {column} = {sign}1000 WHERE seq = 1234")
            (target,) = buffer.store.db.one("SELECT entry FROM entries WHERE seq = 1234")
        [lease] = await buffer.lease(1)
        assert lease.entry == target
        await buffer.check_conservation()

    target = ""
    run(work())


def test_a_priority_is_asked_of_no_more_entries_among_thousands_than_its_windows_hold(world: BufferWorld):
    async def work():
        asked: list[str] = []
        buffer = await world.start(priority=lambda candidate: asked.append(candidate.entry) or 0.0)
        with buffer.store.db.transaction():
            insert_entries(buffer.store.db, "r", 0, 3000)
        await buffer.lease(16)
        assert len(asked) == len(set(asked)) <= 2 * 8 * 16

    run(work())


@pytest.mark.parametrize("by", ["priority", "age", "newest", "reward", "advantage"])
@pytest.mark.parametrize("by_source", [False, True])
def test_an_index_keeps_every_order_so_that_no_lease_sorts_what_waits(world: BufferWorld, by: str, by_source: bool):
    buffer = world.open()
    choosing, db = buffer.store.choosing, buffer.store.db
    with db.transaction():
        choosing._need_index(by, by_source)
        given = dict.fromkeys(("buffer", "run", "class", "source", "before", "limit"), 0)
        for is_own in (True, False):
            for condition, ordering in _PASSES[by]:
                plan = db.all(f"EXPLAIN QUERY PLAN {_select(False, is_own, by_source, condition, ordering)}", given)
                assert "TEMP B-TREE" not in str(plan), plan


# ----------------------------------------------------------------------------------------------------- refusals


def fails(candidate: Candidate) -> float:
    return 1 / 0


@pytest.mark.parametrize(
    ("priority", "found"),
    [(fails, "ZeroDivisionError"), (lambda candidate: math.nan, "nan"), (lambda candidate: "high", "ValueError")],
)
def test_a_priority_that_fails_is_named_with_the_entry_and_nothing_is_leased(
    world: BufferWorld, priority: Any, found: str
):
    async def work():
        buffer = await world.start(priority=priority)
        entry = await put_group(buffer, "a")
        with pytest.raises(PluginError, match=f"buffer.priority: .*'r/train/a/0'.*{found}.*nothing was leased"):
            await buffer.lease(1)
        assert await states(buffer) == {entry: "ready"}
        assert (await buffer.stats())["uses/leased"] == 0

    run(work())


def test_a_window_that_there_is_not_and_what_is_no_function_are_refused_at_the_door(world: BufferWorld):
    def mine(candidate: Candidate) -> float:
        return 0.0

    mine.windows = ("luck",)
    with pytest.raises(ConfigError, match=r"buffer.priority.windows: found luck; expected some of priority, age"):
        world.open(priority=mine)
    with pytest.raises(ConfigError, match=r"module:function"):
        world.open(priority=7)


def test_a_deterministic_run_keeps_the_order_of_admission(world: BufferWorld):
    async def work():
        buffer = await world.start(priority=lambda candidate: candidate.reward, deterministic=True)
        for key, reward in (("a", 0.0), ("b", 1.0)):
            await put_group(buffer, key, rewards=(reward,))
        assert keys(await buffer.lease(2, wait=False)) == "ab"

    run(work())


def test_a_run_file_names_a_priority_by_name_or_import_path():
    named = BufferSettings.model_validate({"priority": {"use": "novelty", "bonus": 2}}).priority
    assert named.bonus == 2
    own = BufferSettings.model_validate({"priority": f"{__name__}:fails"}).priority
    assert own is fails
    with pytest.raises(ValueError, match="did you mean 'novelty'"):
        BufferSettings.model_validate({"priority": "novelti"})
