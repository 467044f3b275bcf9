"""What a step trains on: shares, replays, bounds, and dynamic sampling that always ends."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triune import registry
from triune.algorithms import whole_shares
from triune.algorithms.samplings.bounded import Bounded
from triune.algorithms.samplings.dynamic import Dynamic
from triune.algorithms.samplings.fifo import Fifo
from triune.algorithms.samplings.freshest import Freshest
from triune.algorithms.samplings.mix import MixSampling
from triune.algorithms.samplings.priority import Priority
from triune.algorithms.samplings.replay import Replay
from triune.errors import ConfigError, RewardError
from triune.ports import AdmissionRule, Refund
from triune.records import GroupId, Source, Task
from triune.testing.buffers import ROOMY, BufferWorld, fill, publish, run, states
from triune.testing.groups import make_group


@pytest.fixture
def world(tmp_path: Path) -> Any:
    from triune.buffer.stores.memory import Memory

    found = BufferWorld(Memory(), tmp_path)
    yield found
    found.end()


def keys(leases: Any) -> list[str]:
    return [lease.group.id.task_key for lease in leases]


async def put(buffer: Any, key: str, rule: AdmissionRule = ROOMY, **options: Any) -> str:
    group = await buffer.admit(Task(key=key), rule)
    made = make_group(group, **options)
    return await buffer.put(made, made)


async def finish_step(buffer: Any, leases: Any, step: int) -> None:
    """Acknowledge and publish, as a trainer that saves after every step."""
    uses = [(lease.entry, lease.use_no) for lease in leases]
    await buffer.ack(uses, checkpoint=f"step-{step + 1}", step=step + 1)
    await publish(buffer, step + 1)


# --------------------------------------------------------------------------------------------------------- shares


def test_three_quarters_of_ten_are_seven_and_eight_in_turn():
    assert [whole_shares([0.75, 0.25], 10, step) for step in range(4)] == [[7, 3], [8, 2], [7, 3], [8, 2]]
    assert [whole_shares([0.7, 0.2, 0.1], 10, step) for step in (0, 999)] == [[7, 2, 1]] * 2
    assert whole_shares([1.0], 5, 3) == [5]


@given(
    weights=st.lists(st.integers(1, 20), min_size=2, max_size=4), num=st.integers(1, 64), steps=st.integers(1, 60),
)  # fmt: skip
def test_whole_shares_add_up_to_every_step_and_to_every_share_and_admission_lets_in_what_is_asked(weights, num, steps):
    shares = [weight / sum(weights) for weight in weights]
    totals = [0] * len(shares)
    for step in range(steps):
        parts = whole_shares(shares, num, step)
        assert sum(parts) == num
        totals = [total + part for total, part in zip(totals, parts, strict=True)]
        due = [share * num * (step + 1) for share in shares]
        assert all(abs(total - wanted) < 1 + 1e-6 for total, wanted in zip(totals, due, strict=True))
        # CONTRACTS C5: at version `step` a slot is free while fewer than (step + 1) x fresh are taken.
        assert totals[0] <= math.ceil((step + 1) * num * shares[0])
        if min(shares) * num >= 1:
            assert min(parts) >= 0


def test_a_mix_takes_its_shares_says_so_and_ends_with_what_is_sampled(world: BufferWorld):
    async def work():
        buffer = await world.start()
        mix = MixSampling(shares={"expert": 0.3, "main": 0.7})
        assert mix.buffers == ("main", "expert")
        assert mix.fresh_ratio == 0.7
        await fill(buffer, 7)
        answers = [
            make_group(GroupId("r", "expert", str(number), 0), rewards=(0.0,), version=-1, source=Source.EXPERT)
            for number in range(9)
        ]
        await buffer.stock(answers, buffer="expert")
        found = [await mix(buffer, 5, step=0), await mix(buffer, 5, step=1)]
        assert [dict(leases.metrics) for leases in found] == [
            {"num_from_main": 3.0, "num_from_expert": 2.0},
            {"num_from_main": 4.0, "num_from_expert": 1.0},
        ]
        sources = [lease.group.experiences[0].source.value for lease in found[1]]
        assert sources == ["policy"] * 4 + ["expert"]
        await buffer.end("the tasks ran out")
        assert await mix(buffer, 5, step=2) == []
        assert (await buffer.stats())["uses/leased"] == 10

    run(work())


def test_a_mix_takes_what_is_left_of_a_buffer_that_nobody_fills(world: BufferWorld):
    async def work():
        buffer = await world.start(filled={"main"})
        await fill(buffer, 4)
        old = make_group(GroupId("before", "t", "k", 0))
        await buffer.put(old, old, buffer="old")
        leases = await MixSampling(shares={"main": 0.5, "old": 0.5})(buffer, 4, step=0)
        assert leases.metrics == {"num_from_main": 2.0, "num_from_old": 1.0}

    run(work())


@pytest.mark.parametrize(
    ("brick", "fields", "message"),
    [
        ("mix", {"shares": {"expert": 1.0}}, "write `shares: {main: 0.75, expert: 0.25}`"),
        ("mix", {"shares": {"main": 0.5, "expert": 0.4}}, "1 in all"),
        ("mix", {"shares": {"main": 1.0}}, "a single buffer needs `use: fifo`"),
        ("mix", {"shares": {"main": 1.5, "expert": -0.5}}, "between 0 and 1"),
        ("replay", {"ratio": 0.75}, "at most 0.5"),
        ("replay", {"ratio": 0.9, "max_uses": 4}, "write `ratio: 0.75`, or raise max_uses"),
    ],
)
def test_fields_that_do_not_fit_each_other_are_refused(brick: str, fields: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message.replace("{", r"\{").replace("}", r"\}")):
        registry.build("sampling", {"use": brick, **fields}, "s").check("algorithm.sampling")


def test_a_share_that_rounds_to_zero_is_refused_with_the_least_that_would_do():
    mix = MixSampling(shares={"main": 0.9, "expert": 0.1})
    mix.check_step("s", 10)
    with pytest.raises(ConfigError, match=r"s.shares.expert: found 0.1, and a step has 4 entries.*at least 0.25, or"):
        mix.check_step("s", 4)
    with pytest.raises(ConfigError, match="enlarge the step"):
        Replay(ratio=0.2).check_step("s", 4)


# ----------------------------------------------------------------------------------------- orders, bounds, replays


def test_fifo_is_by_age_freshest_by_version_and_priority_by_what_it_is_told(world: BufferWorld):
    async def work():
        buffer = await world.start()
        for step in range(2):
            await publish(buffer, step)
        await put(buffer, "a", version=0, rewards=(0.0, 0.0))
        await put(buffer, "b", version=1, rewards=(0.0, 0.0), priority=1.0)
        await put(buffer, "c", version=0, rewards=(1.0, 0.0))
        for brick, expected in (
            (Fifo(), "abc"), (Freshest(), "bac"), (Priority(), "bac"), (Priority(by="reward"), "cab")
        ):  # fmt: skip
            leases = await brick(buffer, 3, step=0)
            assert keys(leases) == list(expected)
            await buffer.give_back()

    run(work())


def test_bounded_never_trains_on_what_is_older_than_its_versions(world: BufferWorld):
    async def work():
        buffer = await world.start()
        for step in range(4):
            await publish(buffer, step)
        for version in range(4):
            await put(buffer, str(version), version=version)
        leases = await Bounded(versions=1)(buffer, 2, step=3, max_staleness=8)
        assert keys(leases) == ["2", "3"]
        assert [lease.staleness for lease in leases] == [1, 0]
        assert leases.metrics["num_stale_dropped"] == 2
        await put(buffer, "4", version=2)
        await put(buffer, "5", version=3)
        assert keys(await Bounded(versions=4)(buffer, 1, step=3, max_staleness=0)) == ["5"]

    run(work())


def test_replays_make_up_their_share_take_no_slot_and_keep_within_their_limits(world: BufferWorld):
    async def work():
        buffer = await world.start()
        replay = Replay(ratio=0.5, max_uses=2, cooldown=1)
        rule = AdmissionRule(max_staleness=0, fresh=4 * replay.fresh_ratio, limit=10)
        await publish(buffer, 0)
        uses: dict[str, list[int]] = {}
        sizes = []
        for step in range(5):
            while await buffer.free_slots(rule):
                await put(buffer, f"t{(await buffer.stats())['admitted']:g}", rule, version=step)
            leases = await replay(buffer, 4, step=step, max_staleness=0)
            sizes.append((len(leases), leases.metrics["num_replayed"]))
            for lease in leases:
                uses.setdefault(lease.entry, []).append(step)
            await finish_step(buffer, leases, step)
        assert sizes == [(2, 0), (2, 0), (4, 2), (4, 2), (4, 2)]
        assert sorted(uses.values()) == [[0, 2]] * 2 + [[1, 3]] * 2 + [[2, 4]] * 2 + [[3]] * 2 + [[4]] * 2
        stats = await buffer.stats()
        assert (stats["admitted"], stats["refunded"], stats["uses/acked"]) == (10, 0, 16)
        await buffer.check_conservation()

    run(work())


def test_replays_can_be_kept_young(world: BufferWorld):
    async def work():
        buffer = await world.start()
        await publish(buffer, 0)
        await put(buffer, "a", version=0)
        replay = Replay(max_age=1, cooldown=2)
        for step in range(4):
            await put(buffer, f"fresh {step}", version=step)
            leases = await replay(buffer, 4 if step == 0 else 2, step=step)
            assert leases.metrics["num_replayed"] == 0, "what has rested for long enough is too old"
            await finish_step(buffer, leases, step)

    run(work())


# ---------------------------------------------------------------------------------------------- dynamic sampling


class Endless:
    """An explorer whose groups are flat unless their number says otherwise; it goes on as long as there are slots."""

    def __init__(self, buffer: Any, num: int, has_spread: Any, *, staleness: int = 0, steps: int = 5) -> None:
        self.buffer, self.has_spread, self.made = buffer, has_spread, 0
        self.rule = AdmissionRule(max_staleness=staleness, fresh=num, limit=num * steps)

    async def run(self) -> None:
        while not await self.buffer.is_finished("r"):
            group = await self.buffer.admit(Task(key=str(self.made)), self.rule)
            if group is None:  # its limit is reached; slots may still be given back, as a real explorer knows
                await asyncio.sleep(0.01)
                continue
            rewards = (1.0, 0.0) if self.has_spread(self.made) else (0.0, 0.0)
            self.made += 1
            version = (await self.buffer.latest_version()).version
            made = make_group(group, rewards=rewards, version=version)
            await self.buffer.put(made, made)


async def steps_of(world: BufferWorld, dynamic: Dynamic, has_spread: Any, *, steps: int = 3, **options: Any) -> Any:
    """Run a trainer's loop beside an endless explorer; its leases, the explorer, and the buffer's numbers."""
    buffer = await world.start()
    await publish(buffer, 0)
    explorer, found = Endless(buffer, 4, has_spread, steps=steps), []
    working = asyncio.create_task(explorer.run())
    for step in range(steps):
        leases = await asyncio.wait_for(dynamic(buffer, 4, step=step, max_staleness=0), 10)
        assert leases, "an endless task set never ends a run"
        found.append(leases)
        await finish_step(buffer, leases, step)
    await buffer.finish("done")
    await working
    await buffer.check_conservation()
    return found, explorer, await buffer.stats()


def test_flat_groups_are_replaced_until_a_step_is_full_and_their_slots_are_refunded(world: BufferWorld):
    async def work():
        found, explorer, stats = await steps_of(world, Dynamic(), lambda number: number % 3 == 0)
        for leases in found:
            assert all(len(set(lease.group.rewards)) == 2 for lease in leases)
            assert leases.metrics["num_short"] == 0
        assert sum(len(leases) for leases in found) == 12
        assert explorer.made == 34, "every third has spread, so the 12th with spread is number 33"
        assert stats["refunds/dropped"] == sum(leases.metrics["num_flat"] for leases in found) == 22
        assert stats["entries/dropped"] == 22

    run(work())


def test_case_30_dynamic_sampling_that_never_fills_is_bounded_and_trains_on_what_there_is_and_says_so(
    world: BufferWorld,
):
    async def work():
        found, explorer, stats = await steps_of(world, Dynamic(max_tries=3), lambda number: number % 16 == 0)
        numbers = [dict(leases.metrics) for leases in found]
        assert numbers[0] == {"num_tries": 3, "num_flat": 9, "num_short": 3}
        assert len(found[0]) == 1
        assert all(len(leases) + metrics["num_short"] == 4 for leases, metrics in zip(found, numbers, strict=True))
        assert all(metrics["num_tries"] <= 3 for metrics in numbers)
        assert stats["admitted"] - stats["refunded"] == 12, "the flat ones of a last try are consumed, untrained"
        assert stats["entries/spent"] == 12
        assert explorer.made == stats["admitted"]

    run(work())


@pytest.mark.parametrize("dynamic", [Dynamic(max_tries=4), Dynamic(max_tries=1000, max_extra=10)])
def test_case_30_tasks_that_are_never_solved_end_with_the_run_s_steps(
    world: BufferWorld, dynamic: Dynamic, caplog: pytest.LogCaptureFixture
):
    async def work():
        found, explorer, stats = await steps_of(world, dynamic, lambda number: False)
        assert [len(leases) for leases in found] == [4, 4, 4]
        assert all(leases.metrics["num_short"] == 4 for leases in found)
        assert explorer.made <= 3 * 16
        assert stats["admitted"] - stats["refunded"] == 12
        assert caplog.text.count("nothing to learn") == 3

    run(work())


def test_case_30_max_extra_bounds_how_many_groups_a_step_replaces(world: BufferWorld):
    async def work():
        found, explorer, _ = await steps_of(world, Dynamic(max_tries=100, max_extra=0), lambda n: n % 4 == 0, steps=2)
        assert [len(leases) for leases in found] == [1, 1]
        assert explorer.made == 8
        assert [leases.metrics["num_tries"] for leases in found] == [1, 1]

    run(work())


def test_when_the_tasks_run_out_dynamic_sampling_trains_on_what_it_has_and_then_ends(world: BufferWorld):
    async def work():
        buffer = await world.start()
        for key, rewards in (("a", (1.0, 0.0)), ("b", (1.0, 1.0))):
            await put(buffer, key, rewards=rewards)
        await buffer.end("the tasks ran out")
        dynamic = Dynamic()
        leases = await dynamic(buffer, 4, step=0)
        assert keys(leases) == ["a"]
        assert leases.metrics == {"num_tries": 1, "num_flat": 1, "num_short": 3}
        assert await dynamic(buffer, 4, step=1) == []
        assert (await states(buffer))["r/train/b/0"] == "dropped"

    run(work())


def test_urgent_entries_come_once_a_step_and_leave_room_for_as_many_groups_with_spread(world: BufferWorld):
    async def work():
        buffer = await world.start()
        await publish(buffer, 0)
        for number in range(40):
            await put(buffer, str(number), rewards=(1.0, 0.0) if number >= 30 else (1.0, 1.0))
        for number in range(20):
            human = make_group(GroupId("r", "people", str(number), 0), source=Source.HUMAN)
            await buffer.put(human, human)
        leases = await Dynamic()(buffer, 8, step=0)
        assert [lease.group.id.taskset for lease in leases if lease.is_urgent] == ["people"] * 2
        assert [lease.group.id.task_key for lease in leases if not lease.is_urgent] == [str(n) for n in range(30, 38)]
        assert leases.metrics == {"num_tries": 5, "num_flat": 30, "num_short": 0}

    run(work())


def test_a_mix_takes_as_many_urgent_entries_as_one_buffer_would(world: BufferWorld):
    async def work():
        buffer = await world.start(filled={"main"})
        await fill(buffer, 4)
        for name in ("main", "old"):
            for number in range(4):
                human = make_group(GroupId("r", f"people of {name}", str(number), 0), source=Source.HUMAN)
                await buffer.put(human, human, buffer=name)
        leases = await MixSampling(shares={"main": 0.5, "old": 0.5})(buffer, 8, step=0)
        assert [lease.group.id.taskset for lease in leases if lease.is_urgent] == ["people of main"]

    run(work())


def test_spread_is_that_of_the_raw_reward_and_only_sampled_groups_are_judged():
    from triune.ports import Lease

    def lease(group: Any) -> Lease:
        return Lease(entry=str(group.id), revision=1, use_no=1, group=group)

    flat = make_group(GroupId("r", "t", "k", 0), rewards=(0.0, 0.0))
    shaped = flat.with_records(
        [row.replace(reward=-0.1 * row.member, metrics={"raw_reward": 0.0}) for row in flat.experiences]
    )
    assert Dynamic().is_flat(lease(flat))
    assert Dynamic().is_flat(lease(shaped)), "a penalty gives spread to answers that are all wrong"
    assert not Dynamic().is_flat(lease(make_group(GroupId("r", "t", "k", 0), rewards=(0.0, 1.0))))
    assert Dynamic(tolerance=2.0).is_flat(lease(make_group(GroupId("r", "t", "k", 0), rewards=(0.0, 1.0))))
    assert not Dynamic().is_flat(lease(make_group(GroupId("r", "t", "k", 0), rewards=(1.0,), source=Source.HUMAN)))
    assert not Dynamic(part="exact").is_flat(lease(make_group(GroupId("r", "t", "k", 0), rewards=(0.0, 1.0))))
    with pytest.raises(RewardError, match="no reward part 'fast'"):
        Dynamic(part="fast").is_flat(lease(flat))


def test_a_flat_group_that_was_refunded_is_not_made_again(world: BufferWorld):
    async def work():
        buffer = await world.start()
        rule = AdmissionRule(max_staleness=0, fresh=1)
        await put(buffer, "a", rule, rewards=(0.0, 0.0))
        asking = asyncio.create_task(Dynamic()(buffer, 1, step=0))
        await put(buffer, "b", rule)
        assert keys(await asking) == ["b"]
        assert await buffer.readmit(rule, max_retries=2) is None
        assert (await buffer.stats())[f"refunds/{Refund.DROPPED}"] == 1

    run(work())
