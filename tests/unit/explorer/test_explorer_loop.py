"""The explorer's loop against a real buffer in memory and a trainer that only counts."""

from __future__ import annotations

import asyncio
import contextlib
import random
from functools import partial

import pytest
from explorer_fakes import Talker, make_scheduler, tokenizer

from triune.buffer import BufferSettings, open_buffer
from triune.errors import EngineError, WorkflowError
from triune.explorer import Explorer, WaveGate
from triune.explorer.assemble import Finished, build_experiences
from triune.pipelines import Shaped
from triune.ports import AdmissionRule, Refund, WeightUpdate
from triune.records import Task

END = "<|im_end|>"


class Tasks:
    """Tasks numbered from 0; the cursor is how many were given."""

    data_hash = "h"

    def __init__(self, num: int) -> None:
        self.num, self.at = num, 0

    def next(self):
        if self.at == self.num:
            return None
        self.at += 1
        return self.make(self.at - 1), self.at

    def make(self, number):
        return Task(key=str(number), data={"question": f"q{number}"})

    def seek(self, cursor):
        self.at = cursor or 0

    def find(self, taskset, key):
        return self.make(int(key))


class Log:
    """A monitor that remembers rows."""

    def __init__(self):
        self.rows, self.waits = [], []

    def log(self, metrics, *, role, step):
        self.rows.append((role, step, dict(metrics)))

    def timed(self, stage):
        return contextlib.nullcontext()

    def waiting(self, role, for_what):
        self.waits.append(for_what)
        return contextlib.nullcontext()


class SwappingTalker(Talker):
    """Serves what it was last given; remembers when it swapped and what ran then."""

    def __init__(self, *args, scheduler=None):
        super().__init__(*args)
        self.version, self.swaps, self.live_at_swap = -1, [], []

    async def swap(self, update, tensors):
        await asyncio.sleep(0)
        self.version = update.version
        self.swaps.append(update.version)


class Channel:
    """Nothing travels."""

    async def fetch(self, update):
        return {}

    def release(self, version):
        self.released = version


class House:
    """An explorer, a buffer and a trainer that only counts."""

    def __init__(
        self, workflow, say=f"7{END}", *, num_tasks=100, steps=4, fresh=2, staleness=0, style="drain", evaluator=None,
        apply=None, deterministic=False, finishes=True, train_s=0.0, group_size=2, **settings,
    ):  # fmt: skip
        self.engine = SwappingTalker(tokenizer(), say if callable(say) else lambda request, text: say)
        served = WaveGate(self.engine) if deterministic else self.engine
        self.buffer = None
        self.monitor, self.tasks = Log(), Tasks(num_tasks)
        self.scheduler = make_scheduler(workflow, engine=served, **settings)
        self.rule = AdmissionRule(max_staleness=staleness, fresh=fresh, limit=steps * fresh if deterministic else None)
        self.steps, self.finishes, self.train_s, self.group_size = steps, finishes, train_s, group_size
        self.deterministic = deterministic
        self.make = lambda: Explorer(
            tasks=self.tasks, buffer=self.buffer, scheduler=self.scheduler, engine=served, channel=Channel(),
            apply=apply or (lambda group: Shaped(group=group)), rule=self.rule, group_size=group_size,
            monitor=self.monitor, style=style, evaluator=evaluator, deterministic=deterministic,
        )  # fmt: skip
        self.trained, self.staleness = [], []

    async def publish(self, step):
        version = await self.buffer.begin_version(step)
        await self.buffer.commit_version(WeightUpdate(version=version, step=step, digest="", dtype="float32"))

    async def train(self):
        await self.publish(0)
        for step in range(1, self.steps + 1):
            leases = await self.buffer.lease(int(self.rule.fresh), max_staleness=self.rule.max_staleness)
            if not leases:
                break
            await asyncio.sleep(self.train_s)
            self.trained += [lease.group for lease in leases]
            self.staleness += [step - 1 - row.oldest_version for lease in leases for row in lease.group.experiences]
            await self.publish(step)
        if self.finishes:
            await self.buffer.finish("done")

    async def run(self, tmp_path):
        self.buffer = open_buffer(BufferSettings(store="memory"), tmp_path, deterministic=self.deterministic)
        await self.buffer.open_run("run", config_hash="", data_hash="")
        await asyncio.wait_for(asyncio.gather(self.make().run(), self.train()), 20)
        stats = await self.buffer.stats()
        await self.buffer.close()
        return stats


async def quick(task, model):
    await model.chat().ask(task.data["question"])
    await asyncio.sleep(random.random() * 0.01)
    return float(int(task.key) % 2)


def test_on_policy_data_was_sampled_by_exactly_the_weights_it_is_trained_on(tmp_path):
    house = House(quick, steps=4, fresh=3)
    asyncio.run(house.run(tmp_path))
    assert len(house.trained) == 12
    assert set(house.staleness) == {0}
    assert house.engine.swaps == [0, 1, 2, 3]


def test_groups_that_have_slots_start_together_so_that_they_are_decoded_together(tmp_path):
    house = House(quick, steps=3, fresh=4, group_size=2)
    generate, running = house.engine.generate, []

    async def noting(request):
        running.append(house.scheduler.num_running)
        return await generate(request)

    house.engine.generate = noting
    asyncio.run(house.run(tmp_path))
    assert len(house.trained) == 12
    assert running[::8] == [8, 8, 8], "when the first rollout of a version asks, all of them run"


def test_the_rows_of_a_version_carry_the_fields_people_look_for(tmp_path):
    house = House(quick, steps=2, fresh=2)
    asyncio.run(house.run(tmp_path))
    role, step, row = house.monitor.rows[0]
    assert (role, step, row["groups"]) == ("explorer", 1, 2.0)
    assert {"reward", "reward_std", "response_length", "truncated_ratio", "flat_group_ratio", "num_failed", "turns",
            "idle_ratio", "time/rollout_s"} <= row.keys()  # fmt: skip
    assert row["reward"] == 0.5
    assert row["flat_group_ratio"] == 1.0
    assert any("slot" in wait for wait in house.monitor.waits)


@pytest.mark.parametrize("staleness", [1, 2])
def test_in_flight_groups_never_exceed_the_staleness_bound(tmp_path, staleness):
    async def uneven(task, model):
        await model.chat().ask("x")
        await asyncio.sleep(0.2 if int(task.key) % 3 == 0 else 0.002)
        return 1.0

    house = House(uneven, steps=8, fresh=2, staleness=staleness, style="inflight", train_s=0.02)
    stats = asyncio.run(house.run(tmp_path))
    assert len(house.trained) == 16
    assert max(house.staleness) <= staleness
    assert any("refund_ratio/stale" in row for _, _, row in house.monitor.rows)
    assert stats["refunded"] > 0


def test_dropped_groups_give_their_slot_back_and_the_run_goes_on(tmp_path):
    def every_second(group):
        keep = int(group.task.key) % 2
        return Shaped(
            group=group if keep else None, dropped_by="" if keep else "drop_even", metrics={"kept": float(keep)}
        )

    house = House(quick, steps=3, fresh=2, apply=every_second)
    asyncio.run(house.run(tmp_path))
    assert len(house.trained) == 6
    assert all(int(group.task.key) % 2 for group in house.trained)
    assert set(house.staleness) == {0}
    assert house.monitor.rows[0][2]["kept"] == 0.5


def test_case_45_the_end_of_data_reaches_the_trainer_with_a_short_last_batch(tmp_path):
    house = House(quick, num_tasks=5, steps=100, fresh=2, finishes=True)
    asyncio.run(house.run(tmp_path))
    assert sorted(int(group.task.key) for group in house.trained) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("style", ["drain", "inflight"])
def test_a_slot_given_back_after_the_last_admission_is_used_so_that_the_trainer_gets_its_batch(
    tmp_path, monkeypatch, style
):
    async def late(task, model):
        reward = await quick(task, model)
        if task.key != "3":
            return reward
        (row,) = build_experiences([Finished(session=model._caller)])
        return [row.replace(reward=None, is_valid=True)]  # it is judged later, and then nobody does

    monkeypatch.setitem(globals(), "BufferSettings", partial(BufferSettings, reward_deadline_s=0.2))
    house = House(late, steps=2, fresh=2, style=style)
    house.rule = AdmissionRule(max_staleness=0, fresh=2, limit=4)
    stats = asyncio.run(house.run(tmp_path))
    assert sorted(int(group.task.key) for group in house.trained) == [0, 1, 2, 4]
    assert (stats["entries/expired"], stats["refunds/invalid"]) == (1, 1)


def test_operators_see_a_group_only_when_its_last_reward_is_there(tmp_path):
    seen = []

    async def late(task, model):
        await quick(task, model)
        (row,) = build_experiences([Finished(session=model._caller)])
        return [row.replace(reward=None if task.key == "1" else 1.0, is_valid=True)]

    def apply(group):
        seen.append(group.task.key)
        return Shaped(group=group)

    house = House(late, num_tasks=3, steps=1, fresh=2, staleness=1, finishes=False, apply=apply)

    async def work():
        house.buffer = open_buffer(BufferSettings(store="memory"), tmp_path)
        await house.buffer.open_run("run", config_hash="", data_hash="")
        explored = asyncio.ensure_future(house.make().run())
        await house.train()
        while not (waiting := await house.buffer.browse(state="waiting")):
            await asyncio.sleep(0.001)
        await house.buffer.finish("done")
        await explored
        await house.buffer.close()
        return [info.entry for info in waiting]

    assert asyncio.run(asyncio.wait_for(work(), 20)) == ["run/train/1/0"]
    assert sorted(seen) == ["0", "2"]


def test_case_46_an_error_of_the_loop_ends_it_at_once_with_its_own_name(tmp_path):
    house = House(quick, steps=4)

    async def broken(update, tensors):
        raise EngineError("engine", "the swap failed")

    house.engine.swap = broken
    with pytest.raises(EngineError, match="the swap failed"):
        asyncio.run(house.run(tmp_path))


def test_case_49_a_workflow_that_never_works_ends_the_run_and_shows_one_failure(tmp_path):
    async def broken(task, model):
        raise KeyError("anser")

    house = House(broken, num_tasks=1000, steps=4, retries=0)
    with pytest.raises(WorkflowError, match="anser"):
        asyncio.run(house.run(tmp_path))


def test_case_49_an_operator_that_fails_on_every_group_ends_the_run_and_names_its_error(tmp_path):
    def broken(group):
        return Shaped(group=None, dropped_by="shaping", error="operator 'shaping' failed (KeyError: 'part')")

    house = House(quick, num_tasks=1000, steps=4, apply=broken)
    with pytest.raises(WorkflowError, match="operator 'shaping' failed"):
        asyncio.run(house.run(tmp_path))


def test_case_49_an_endless_stream_of_tasks_that_are_all_set_aside_ends_the_run(tmp_path):
    async def broken(task, model):
        raise KeyError("anser")

    house = House(broken, num_tasks=10**9, steps=4, retries=0, quarantine_after=1)
    house.tasks.make = lambda number: Task(key=str(number % 3), data={"question": "q"})
    with pytest.raises(WorkflowError, match="in a row are set aside"):
        asyncio.run(house.run(tmp_path))


@pytest.mark.parametrize(("deterministic", "tries"), [(False, 1), (True, 0)])
def test_a_task_that_was_set_aside_before_a_resume_gets_one_more_group_and_none_where_runs_repeat(
    tmp_path, deterministic, tries
):
    seen = []

    async def poison(task, model):
        if task.key == "1":
            seen.append(task.key)
            raise ValueError("poison")
        return await quick(task, model)

    house = House(poison, steps=6, deterministic=deterministic, retries=0, quarantine_after=2)
    house.tasks.make = lambda number: Task(key=str(number % 4), data={"question": "q"})

    async def work():
        house.buffer = open_buffer(BufferSettings(store="memory"), tmp_path, deterministic=deterministic)
        await house.buffer.open_run("run", config_hash="", data_hash="")
        for _ in range(2):
            group = await house.buffer.admit(Task(key="1"), AdmissionRule(max_staleness=0, fresh=9))
            await house.buffer.refund(group, Refund.INVALID)
        await asyncio.wait_for(asyncio.gather(house.make().run(), house.train()), 20)
        await house.buffer.close()

    asyncio.run(work())
    assert len(house.trained) == 12
    assert len(seen) == 2 * tries


def test_operators_that_drop_everything_are_named_while_the_trainer_waits(tmp_path, caplog):
    house = House(quick, num_tasks=130, apply=lambda group: Shaped(group=None, dropped_by="drop_flat_groups"))
    asyncio.run(house.run(tmp_path))
    said = [record.getMessage() for record in caplog.records if "groups in a row were dropped" in record.getMessage()]
    assert [text.split()[0] for text in said] == ["64", "128"]
    assert "drop_flat_groups" in said[0]


def test_a_timeout_in_a_deterministic_run_says_that_it_cannot_be_repeated(tmp_path, caplog):
    async def slow_once(task, model):
        if task.key == "1":
            await asyncio.sleep(60)
        return await quick(task, model)

    house = House(slow_once, steps=2, deterministic=True, rollout_timeout_s=0.5, grace_s=0.01)
    asyncio.run(house.run(tmp_path))
    assert len(house.trained) == 4
    assert "cannot be repeated bit by bit" in caplog.text


class Judge:
    """An evaluator that is due at some steps."""

    def __init__(self, due):
        self.due, self.seen = due, []

    def is_due(self, step):
        return step in self.due

    async def evaluate(self, update):
        self.seen.append((update.version, self.house.scheduler.num_running))
        await asyncio.sleep(0.01)
        assert self.house.engine.version == update.version
        return {}


@pytest.mark.parametrize("style", ["drain", "inflight"])
def test_due_versions_are_measured_before_rollouts_start_with_them_and_so_is_the_last(tmp_path, style):
    judge = Judge({0, 2, 4})
    house = House(quick, steps=4, fresh=2, evaluator=judge, style=style)
    judge.house = house
    asyncio.run(house.run(tmp_path))
    assert [version for version, _ in judge.seen] == [0, 2, 4]
    if style == "drain":
        assert {running for _, running in judge.seen} == {0}


def test_open_groups_of_an_earlier_incarnation_run_first_and_the_cursor_goes_on(tmp_path):
    house = House(quick, steps=2, fresh=2, num_tasks=50)

    async def crash_and_resume():
        house.buffer = open_buffer(BufferSettings(store="memory"), tmp_path)
        await house.buffer.open_run("run", config_hash="", data_hash="")
        for _ in range(2):
            task, cursor = house.tasks.next()
            await house.buffer.admit(task, house.rule, cursor=cursor)
        house.tasks = Tasks(50)  # a new process knows nothing
        await house.buffer.open_run("run", config_hash="", data_hash="")
        await asyncio.wait_for(asyncio.gather(house.make().run(), house.train()), 20)
        await house.buffer.close()

    asyncio.run(crash_and_resume())
    assert [int(group.task.key) for group in house.trained[:2]] == [0, 1]
    assert sorted(int(group.task.key) for group in house.trained) == [0, 1, 2, 3]


def test_a_deterministic_run_decodes_in_the_same_waves_whatever_the_timing(tmp_path):
    async def uneven(task, model):
        chat = model.chat()
        for _ in range(1 + int(task.key) % 3):
            await chat.ask("x")
            await asyncio.sleep(random.random() * 0.01)
        return float(int(task.key) % 2)

    seen = []
    for _ in range(2):
        house = House(uneven, steps=3, fresh=4, deterministic=True, max_rollouts=5)
        asyncio.run(house.run(tmp_path))
        waves = [(request.id.split("/", 1)[1], request.seed) for request in house.engine.requests]
        seen.append((waves, [str(group.id) for group in house.trained]))
    assert seen[0] == seen[1]
    assert len(seen[0][1]) == 12
