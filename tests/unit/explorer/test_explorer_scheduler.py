"""Deadlines, attempts, partial groups and quarantine."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from explorer_fakes import Talker, completion, group_id, make_scheduler, run_group, task, tokenizer

from triune.errors import EngineError, EnvironmentFault, RewardError
from triune.explorer.workflows.single_turn import SingleTurn
from triune.ports import Refund, Reward
from triune.records import Stop, encode_group

END = "<|im_end|>"


def returns(value):
    async def workflow(task, model):
        await model.chat().ask("x")
        return value

    return workflow


class Tensor:
    """Stands for a tensor: one element has an item."""

    def __init__(self, *values):
        self.values = values

    def numel(self):
        return len(self.values)

    def item(self):
        return self.values[0]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(True, 1.0), (2, 2.0), (np.float32(0.5), 0.5), (np.array([0.25]), 0.25), (Tensor(0.75), 0.75),
     ({"total": 1, "style": 0.5}, 1.0), (Reward(total=3.0), 3.0)],
)  # fmt: skip
def test_case_35_rewards_of_many_types_are_converted(value, expected):
    outcome = run_group(make_scheduler(returns(value)), 1)
    assert outcome.group.rewards.tolist() == [expected]


@pytest.mark.parametrize("value", [None, "1.0", [1.0, 2.0], math.nan, math.inf, {"total": math.nan}, Tensor(1.0, 2.0)])
def test_case_35_what_is_no_reward_is_refused_with_the_tasks_id(value):
    outcome = run_group(make_scheduler(returns(value), min_group=1), 1)
    (row,) = outcome.group.experiences
    assert (row.is_valid, row.reward) == (False, None)
    assert "train/k" in outcome.failures[0]["error"]
    assert outcome.refund is Refund.INVALID


def test_case_34_a_verifier_that_fails_makes_the_rollout_invalid_and_leaves_the_statistics():
    async def verifier(task, answer):
        if answer == "bad":
            raise RuntimeError("no verdict")
        return float(answer)

    said = iter(["1", "bad", "0"])
    scheduler = make_scheduler(SingleTurn(), lambda request, text: next(said) + END, verifier, min_group=2)
    outcome = run_group(scheduler, 3)
    assert [row.is_valid for row in outcome.group.experiences] == [True, False, True]
    assert outcome.group.experiences[1].reward is None
    assert outcome.group.rewards.tolist() == [1.0, 0.0]
    assert outcome.metrics["reward"] == 0.5
    assert outcome.metrics["failed/reward"] == 1.0
    assert outcome.refund is None


def test_a_greedy_member_answers_at_temperature_0_in_training_groups_only():
    scheduler = make_scheduler(returns(1.0), greedy_member=True, temperature=0.7)
    temperatures = [row.temperature for row in run_group(scheduler, 3).group.experiences]
    assert temperatures == pytest.approx([0.7, 0.7, 0.0])
    by_member = make_scheduler(
        SingleTurn(), lambda request, text: ("1" if request.sampling.temperature else "0") + END,
        lambda task, answer: float(answer), greedy_member=True,
    )  # fmt: skip
    assert run_group(by_member, 3).metrics["reward"] == 1.0, "a baseline is no part of what the step was like"
    outcome = asyncio.run(scheduler.run(group_id(), task(), num=3, training=False))
    assert [row.temperature for row in outcome.group.experiences] == pytest.approx([0.7] * 3)


def test_what_workflows_note_under_our_names_stands_beside_our_numbers_and_not_in_them():
    async def workflow(task, model):
        await model.chat().ask("x")
        model.note(turns=3, reward=10.0, num_calls=2.0, depth=4.0)
        return Reward(total=1.0, parts={"style": 0.5}, metrics={"reward/style": 7.0})

    metrics = run_group(make_scheduler(workflow), 2).metrics
    ours = {"turns": 1.0, "reward": 1.0, "reward/style": 0.5, "depth": 4.0}
    theirs = {"user/turns": 3.0, "user/reward": 10.0, "user/reward/style": 7.0, "user/num_calls": 2.0}
    assert {name: metrics[name] for name in (*ours, *theirs)} == {**ours, **theirs}
    assert "num_calls" not in metrics


def test_an_invalid_reward_struct_is_not_zero():
    outcome = run_group(make_scheduler(returns(Reward(total=0.0, is_valid=False)), min_group=1), 1)
    assert outcome.group.experiences[0].reward is None


def hangs_for(member, seconds=60.0, value=1.0):
    """A workflow whose rollout number `member` hangs after its first answer."""

    async def workflow(task, model):
        answer = await model.chat().ask("x")
        if answer == str(member):
            await asyncio.sleep(seconds)
        return value

    return workflow


def by_member(request, text):
    return request.id.rsplit("/", 1)[0].rsplit("/", 1)[1].split(".")[0] + END


def test_case_44_a_straggler_ends_at_its_deadline_and_the_rest_of_the_group_goes_on():
    scheduler = make_scheduler(hangs_for(1), by_member, rollout_timeout_s=0.2, min_group=3)
    start = time.monotonic()
    outcome = run_group(scheduler, 4)
    assert time.monotonic() - start < 5.0
    assert outcome.refund is None
    assert [row.is_valid for row in outcome.group.experiences] == [True, False, True, True]
    late = outcome.group.experiences[1]
    assert late.stop is Stop.TIMEOUT
    assert late.num_actions == 2  # what it had said is kept
    assert outcome.failures[0]["boundary"] == "timeout"


def equal(task, answers):
    return [1.0] * len(answers)


def scored_but_one_hangs(hangs_after_reward=False):
    async def workflow(task, model, reward):
        answer = await model.chat().ask("x")
        if answer == "1" and not hangs_after_reward:
            await asyncio.sleep(60)
        value = await reward(task, answer)
        if answer == "1":
            await asyncio.sleep(60)
        return value

    return workflow


def test_case_44_a_straggler_does_not_take_those_along_that_wait_to_be_scored_with_it():
    async def takes_time(task, answers):
        await asyncio.sleep(0.1)
        return equal(task, answers)

    scheduler = make_scheduler(scored_but_one_hangs(), by_member, takes_time, rollout_timeout_s=0.2, min_group=3)
    outcome = run_group(scheduler, 4)
    assert outcome.refund is None
    assert [row.is_valid for row in outcome.group.experiences] == [True, False, True, True]
    assert [failure["boundary"] for failure in outcome.failures] == ["timeout"]


@pytest.mark.parametrize("hangs", ["member", "reward"])
def test_clocks_that_stood_still_for_the_group_go_on_when_it_is_scored(hangs):
    async def never(task, answers):
        await asyncio.sleep(60)

    workflow = scored_but_one_hangs(hangs_after_reward=hangs == "member")
    scheduler = make_scheduler(workflow, by_member, equal if hangs == "member" else never,
                               rollout_timeout_s=0.2, grace_s=0.02, min_group=1)  # fmt: skip
    start = time.monotonic()
    outcome = run_group(scheduler, 3)
    assert time.monotonic() - start < 5.0
    assert [row.is_valid for row in outcome.group.experiences] == [hangs == "member", False, hangs == "member"]
    assert {failure["boundary"] for failure in outcome.failures} == {"timeout"}


def test_case_44_too_few_valid_members_give_the_slot_back():
    outcome = run_group(make_scheduler(hangs_for(1), by_member, rollout_timeout_s=0.1), 3)
    assert outcome.refund is Refund.TOO_SMALL
    assert outcome.group is not None


def test_case_54_the_timeout_bounds_a_rollout_with_all_its_attempts():
    async def fails_slowly(task, model):
        await asyncio.sleep(0.15)
        raise ValueError("again")

    start = time.monotonic()
    outcome = run_group(make_scheduler(fails_slowly, rollout_timeout_s=0.4, retries=9), 2)
    assert 0.3 < time.monotonic() - start < 3.0
    assert outcome.refund is Refund.INVALID


def test_case_54_code_that_swallows_its_cancellation_is_left_behind_after_the_grace_period():
    heard, stop = [], []

    async def stubborn(task, model):
        while not stop:
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                heard.append("cancelled")
        return 1.0

    async def timed():
        start = time.monotonic()
        scheduler = make_scheduler(stubborn, rollout_timeout_s=0.1, grace_s=0.1)
        outcome = await scheduler.run(group_id(), task(), num=1)
        by_then = list(heard)
        stop.append(True)
        return outcome, time.monotonic() - start, scheduler.num_running, by_then

    outcome, seconds, running, by_then = asyncio.run(timed())
    assert seconds < 5.0
    assert by_then == ["cancelled"]
    assert outcome.failures[0]["boundary"] == "timeout"
    assert running == 0


def test_a_late_call_of_an_abandoned_rollout_is_refused_and_never_recorded():
    errors = []

    async def comes_late(task, model):
        chat = model.chat()
        await chat.ask("x")
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        try:
            await chat.ask("late")
        except Exception as error:
            errors.append(type(error).__name__)
        return 1.0

    outcome = run_group(make_scheduler(comes_late, rollout_timeout_s=0.1, grace_s=0.2), 1)
    assert errors == ["SessionClosed"]
    assert len(outcome.group.experiences[0].turns) == 1


def test_case_44_a_failed_member_is_replaced_by_a_new_attempt_that_forks_nothing():
    tries = []

    async def fails_first(task, model):
        chat = model.chat()
        tries.append(await chat.ask("x"))
        if len(tries) == 1:
            raise EnvironmentFault("env", "down")
        return 1.0

    said = iter(["first", "second"])
    outcome = run_group(make_scheduler(fails_first, lambda request, text: next(said) + END), 1)
    (row,) = outcome.group.experiences
    assert row.id.rollout.attempt == 1
    assert tokenizer().decode(row.tokens).count("first") == 0
    assert row.is_valid
    assert outcome.num_failed == 1
    assert outcome.failures[0]["boundary"] == "environment"


def test_attempts_and_members_have_seeds_of_their_own_and_the_same_in_every_run():
    seeds = []
    for _ in range(2):
        engine = Talker(tokenizer(), lambda request, text: ValueError() if ".0/" in request.id else f"A{END}")
        run_group(make_scheduler(returns(1.0), engine=engine), 3)
        seeds.append([request.seed for request in engine.requests])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 6
    assert all(0 <= seed < 2**64 for seed in seeds[0])


def test_case_09_two_groups_never_share_a_seed():
    engine = Talker(tokenizer(), lambda request, text: f"A{END}")
    scheduler = make_scheduler(returns(1.0), engine=engine)

    async def both():
        for visit in range(2):
            await scheduler.run(group_id(visit=visit), task(), num=4)
        await scheduler.run(group_id("other"), task("other"), num=4)

    asyncio.run(both())
    assert len({request.seed for request in engine.requests}) == 12


def test_case_47_an_aborted_completion_is_no_short_normal_answer():
    cut = completion(np.array([1, 2]), stop=Stop.ABORTED)
    outcome = run_group(make_scheduler(returns(1.0), lambda request, text: cut, retries=0), 1)
    (row,) = outcome.group.experiences
    assert (row.stop, row.is_valid, row.reward) == (Stop.ABORTED, False, None)
    assert outcome.failures[0]["boundary"] == "aborted"


def test_an_engine_that_fails_is_named_and_tried_again():
    said = iter([EngineError("engine", "out of memory"), f"A{END}"])
    outcome = run_group(make_scheduler(returns(1.0), lambda request, text: next(said)), 1)
    assert outcome.failures[0]["boundary"] == "engine"
    assert outcome.refund is None


def test_case_44_a_poison_task_is_quarantined_and_others_are_not():
    async def poison(task, model):
        if task.key == "poison":
            raise ValueError("poison")
        await model.chat().ask("x")
        return 1.0

    scheduler = make_scheduler(poison, quarantine_after=2, retries=0)

    async def visits():
        bad = [await scheduler.run(group_id("poison", v), task("poison"), num=2) for v in range(2)]
        good = await scheduler.run(group_id("good"), task("good"), num=2)
        return bad, good

    bad, good = asyncio.run(visits())
    assert [outcome.refund for outcome in bad] == [Refund.INVALID, Refund.QUARANTINED]
    assert scheduler.is_quarantined(task("poison"))
    assert not scheduler.is_quarantined(task("good"))
    assert good.refund is None


def test_no_more_rollouts_run_than_there_are_lanes_and_all_lanes_come_back():
    running, most = set(), []

    async def workflow(task, model):
        me = object()
        running.add(me)
        most.append(len(running))
        await asyncio.sleep(0.01)
        running.discard(me)
        if len(most) % 3 == 0:
            raise ValueError("sometimes")
        return 1.0

    scheduler = make_scheduler(workflow, max_rollouts=3, retries=1)

    async def groups():
        await asyncio.gather(*(scheduler.run(group_id(str(n)), task(str(n)), num=4) for n in range(4)))
        await asyncio.wait_for(scheduler.room(), 1)

    asyncio.run(groups())
    assert max(most) == 3
    assert scheduler.num_running == 0


def test_a_cancelled_group_gives_its_lanes_back():
    scheduler = make_scheduler(hangs_for(0), by_member, max_rollouts=2)

    async def cancel():
        run = asyncio.create_task(scheduler.run(group_id(), task(), num=4))
        await asyncio.sleep(0.05)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        await asyncio.sleep(0)
        assert scheduler.num_running == 0

    asyncio.run(asyncio.wait_for(cancel(), 5))


def test_groups_overtaken_by_weights_end_as_stale():
    engine = Talker(tokenizer(), by_member)
    scheduler = make_scheduler(hangs_for(0), engine=engine)

    async def overtake():
        run = asyncio.create_task(scheduler.run(group_id(), task(), num=2))
        await asyncio.sleep(0.02)
        engine.version = 2
        assert scheduler.abort_older_than(0) == 0
        assert scheduler.abort_older_than(1) == 1
        return await run

    outcome = asyncio.run(asyncio.wait_for(overtake(), 5))
    assert outcome.refund is Refund.STALE
    assert outcome.group is None
    assert scheduler.num_running == 0


def test_case_26_all_members_of_a_group_get_the_same_task():
    async def workflow(task, model):
        await model.chat().ask(task.data["question"])
        return 1.0

    scheduler = make_scheduler(workflow, max_rollouts=5)

    async def groups():
        runs = [scheduler.run(group_id(str(n)), task(str(n), question=f"q{n}"), num=3) for n in range(4)]
        return await asyncio.gather(*runs)

    for number, outcome in enumerate(asyncio.run(groups())):
        for row in outcome.group.experiences:
            assert row.messages[0]["content"] == f"q{number}"
        assert outcome.group.task.key == str(number)


def test_evaluation_has_its_own_sampling_and_never_refuses_a_group():
    engine = Talker(tokenizer(), lambda request, text: f"A{END}")
    from triune.ports import Sampling

    scheduler = make_scheduler(returns(None), engine=engine, quarantine_after=1)
    run = scheduler.run(group_id(), task(), num=1, sampling=Sampling(temperature=0.0), training=False)
    outcome = asyncio.run(run)
    assert outcome.refund is None
    assert engine.requests[0].sampling.temperature == 0.0
    assert engine.requests[0].sampling.stop_ids == tokenizer().stop_ids
    assert not scheduler.is_quarantined(task())


def test_errors_of_user_code_are_data_and_name_their_boundary():
    async def raises(task, model):
        raise RewardError("task train/k", "no verdict")

    for error, boundary in ((ValueError("x"), "workflow"), (RewardError("r", "y"), "reward")):

        async def workflow(task, model, error=error):
            raise error

        outcome = run_group(make_scheduler(workflow, retries=0), 1)
        assert outcome.failures[0]["boundary"] == boundary
        assert outcome.group is None


def test_a_reward_of_nothing_is_no_valid_rollout():
    async def lazy(task, model):
        return 1.0

    outcome = run_group(make_scheduler(lazy, retries=0))
    assert (outcome.group, outcome.refund) == (None, Refund.INVALID)
    assert "without asking the model" in outcome.failures[0]["error"]

    asked = []

    async def half_lazy(task, model):
        asked.append(1)
        if len(asked) == 1:
            await model.chat().ask("x")
        return 1.0

    outcome = run_group(make_scheduler(half_lazy, retries=0, min_group=2))
    assert outcome.refund is Refund.TOO_SMALL
    assert [failure["boundary"] for failure in outcome.failures] == ["workflow"]


@pytest.mark.parametrize("error", [StopIteration("x"), SystemExit(0), GeneratorExit()], ids=repr)
def test_whatever_ends_a_plain_workflow_is_its_failure_at_once(error):
    def raises(task, model):
        raise error

    outcome = run_group(make_scheduler(raises, retries=0), 1)
    assert [failure["boundary"] for failure in outcome.failures] == ["workflow"]
    assert type(error).__name__ in outcome.failures[0]["error"]


def test_sys_exit_in_async_code_or_in_a_reward_ends_a_rollout_and_not_the_run():
    async def leaves(task, model):
        await asyncio.sleep(0)
        sys.exit("enough")

    outcome = run_group(make_scheduler(leaves, retries=0), 1)
    assert [failure["boundary"] for failure in outcome.failures] == ["workflow"]
    assert "SystemExit: enough" in outcome.failures[0]["error"]

    def judge(task, answer):
        sys.exit(2)

    outcome = run_group(make_scheduler(SingleTurn(), reward=judge, retries=0), 1)
    assert [failure["boundary"] for failure in outcome.failures] == ["reward"]


def test_messages_that_cannot_be_stored_fail_their_rollout_and_its_tokens_are_kept():
    async def odd(task, model):
        first = {"role": "user", "content": "x"}
        await model.generate([first])
        answer = await model.generate([{**first, "seen": object()}])
        model.note_turn(reward=1.0)
        return float(len(answer.text))

    async def odd_note(task, model):
        await model.chat().ask("x")
        model.note_turn(state_key=object())
        return 1.0

    for workflow in (odd, odd_note):
        outcome = run_group(make_scheduler(workflow, retries=0), 1)
        assert outcome.refund is Refund.INVALID
        assert "not a JSON-like value: a object" in outcome.failures[0]["error"]
        encode_group(outcome.group)
        row = outcome.group.experiences[-1]
        assert (row.is_valid, row.num_actions, len(row.messages)) == (False, 2, 0)


def test_inline_code_that_blocks_the_loop_is_named_with_its_line(caplog):
    async def rude(task, model):
        time.sleep(1.6)  # the line that is named
        return 1.0

    scheduler = make_scheduler(rude)

    async def one():
        await scheduler.run(group_id(), task(), num=1)
        await scheduler.close()

    asyncio.run(one())
    (said,) = [record.getMessage() for record in caplog.records]
    source = Path(__file__).read_text().splitlines()
    line = next(n for n, text in enumerate(source, 1) if "the line that is named" in text)
    assert f"test_explorer_scheduler.py:{line} in rude blocks the event loop" in said
    assert "explorer.runner: process" in said
