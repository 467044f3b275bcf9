"""User code in processes of its own."""

from __future__ import annotations

import asyncio
import os
import time
from types import SimpleNamespace

import explorer_runner_workflows as flows
import pytest
from explorer_fakes import group_id, make_scheduler, task

from triune.errors import ConfigError
from triune.explorer import bind_workflow
from triune.explorer.runners import RunnerPool
from triune.records import Stop

END = "<|im_end|>"


def by_member(request, text):
    return request.id.rsplit("/", 1)[0].rsplit("/", 1)[1] + END  # member.attempt


@pytest.fixture(scope="module")
def house():
    """One loop and one pool of two warm processes for all tests; those that are killed are replaced."""
    with asyncio.Runner() as loop:
        pool = RunnerPool(2, grace_s=0.1, block_s=0.3)
        loop.run(fill(pool))
        yield loop, pool
        loop.run(pool.close())


async def fill(pool):
    """Have both processes up."""
    while len(pool.pids) < 2:
        await make_scheduler(flows.blocking, f"7{END}", runners=pool, runner="process").run(group_id(), task(), num=2)
    await asyncio.sleep(0.02)


def run(house, workflow, say=f"7{END}", reward=None, *, num=2, key="k", **settings):
    """One group; returns its outcome, seconds, and pids before and after."""
    loop, pool = house

    async def body():
        await fill(pool)
        before = pool.pids
        scheduler = make_scheduler(workflow, say, reward, runners=pool, **{"runner": "auto", **settings})
        start = time.monotonic()
        outcome = await scheduler.run(group_id(key), task(key), num=num)
        seconds = time.monotonic() - start
        await asyncio.sleep(0.2)
        assert scheduler.num_running == 0
        return outcome, seconds, before, pool.pids

    return loop.run(asyncio.wait_for(body(), 30))


def test_a_workflow_in_a_runner_is_recorded_like_one_inline(house):
    outcome, _, before, _ = run(house, flows.Polite(question="q"), f"77{END}", flows.length)
    inline = asyncio.run(
        make_scheduler(flows.Polite(question="q"), f"77{END}", flows.length).run(group_id(), task(), num=2)
    )
    for there, here in zip(outcome.group.experiences, inline.group.experiences, strict=True):
        assert there.tokens.tolist() == here.tokens.tolist()
        assert there.action_mask.tolist() == here.action_mask.tolist()
        assert (there.id, there.reward, there.reward_parts) == (here.id, here.reward, here.reward_parts)
        assert there.turns == here.turns
        assert there.stop is here.stop is Stop.MAX_TURNS
        assert there.messages == here.messages
        assert there.metrics["pid"] in before
    assert os.getpid() not in before


def test_plain_functions_run_alone_and_group_rewards_beside_the_sessions(house):
    outcome, _, before, _ = run(house, flows.blocking)
    assert outcome.group.rewards.tolist() == [1.0, 1.0]
    assert {row.metrics["pid"] for row in outcome.group.experiences} == set(before)
    outcome, _, _, _ = run(house, flows.Polite(), by_member, flows.ranked)
    assert outcome.group.rewards.tolist() == [3.0, 3.0]


def test_case_55_case_54_blocking_code_is_killed_at_its_deadline_and_the_worker_comes_back(house):
    outcome, seconds, before, after = run(house, flows.sleeps_for_ever, num=3, rollout_timeout_s=0.3, min_group=1)
    assert [failure["boundary"] for failure in outcome.failures] == ["timeout"] * 3
    assert not set(before) & set(after)
    assert not any(_alive(pid) for pid in before)
    assert 0.6 < seconds < 20.0  # two at a time, each with a clock of its own; then a new process must start
    assert outcome.group.experiences[0].stop is Stop.TIMEOUT


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_rollouts_beside_one_that_blocks_are_tried_again_as_new_attempts(house):
    outcome, seconds, _, _ = run(
        house, flows.blocks_the_loop, by_member, num=6, rollout_timeout_s=2.0, min_group=5, retries=0
    )
    rows = outcome.group.experiences
    assert 2.0 < seconds < 6.0
    assert [row.is_valid for row in rows] == [False, *[True] * 5]
    assert rows[0].stop is Stop.TIMEOUT
    assert {row.id.rollout.attempt for row in rows[1:]} == {0, 1}  # only those beside it were tried again
    assert "blocks the runner process" in outcome.failures[0]["error"]


def test_a_process_that_dies_is_replaced_and_its_rollouts_are_tried_again(house):
    outcome, _, _, _ = run(house, flows.dies, by_member, num=3, retries=2)
    assert [row.is_valid for row in outcome.group.experiences] == [True] * 3
    assert all(row.id.rollout.attempt >= 1 for row in outcome.group.experiences)
    assert {failure["boundary"] for failure in outcome.failures} == {"runner"}


def test_errors_keep_their_boundary_and_say_where_they_arose(house):
    outcome, _, _, _ = run(house, flows.raises, num=1, retries=0)
    assert outcome.failures[0]["boundary"] == "workflow"
    assert "KeyError: 'anser' (at " in outcome.failures[0]["error"]
    assert "explorer_runner_workflows.py" in outcome.failures[0]["error"]
    outcome, _, before, after = run(house, flows.exits, num=1, retries=0)
    assert (outcome.failures[0]["boundary"], before) == ("workflow", after)
    assert "SystemExit: 3 (at " in outcome.failures[0]["error"]
    outcome, _, _, _ = run(house, flows.raises, num=1, retries=0, key="env")
    assert outcome.failures[0]["boundary"] == "environment"


def test_code_that_another_process_cannot_import_is_refused_when_a_process_is_asked_for(house):
    async def local(task, model):
        await model.chat().ask("x")
        return 1.0

    with pytest.raises(ConfigError, match="cannot be imported by a runner process"):
        run(house, local, runner="process")
    outcome, _, _, _ = run(house, local, runner="auto")  # auto: inline
    assert outcome.refund is None


def test_plain_functions_that_are_scored_together_need_a_process_each(house):
    with pytest.raises(ConfigError, match="2 processes for groups of 3 that are scored together"):
        run(house, flows.scored_plain, reward=flows.ranked, num=3)
    outcome, _, _, _ = run(house, flows.scored_plain, by_member, flows.ranked, num=2)
    assert outcome.group.rewards.tolist() == [3.0, 3.0]


def test_what_fails_beside_the_session_reaches_the_workflow_and_is_no_timeout(house):
    outcome, seconds, _, _ = run(house, flows.asks_for_nonsense, num=1, retries=0, rollout_timeout_s=20.0)
    assert [failure["boundary"] for failure in outcome.failures] == ["workflow"]
    assert "AttributeError" in outcome.failures[0]["error"]
    assert seconds < 10


def test_processes_that_cannot_be_started_fail_their_rollouts_instead_of_letting_them_wait(monkeypatch):
    def no_memory(*args, **kwargs):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("subprocess.Popen", no_memory)

    async def body():
        pool = RunnerPool(2)
        scheduler = make_scheduler(flows.blocking, f"7{END}", runners=pool, runner="process", retries=0)
        outcome = await asyncio.wait_for(scheduler.run(group_id(), task(), num=3), 10)
        await scheduler.close()
        return outcome

    outcome = asyncio.run(body())
    assert {failure["boundary"] for failure in outcome.failures} == {"runner"}
    assert "Cannot allocate memory" in outcome.failures[0]["error"]


def test_what_user_code_prints_goes_to_stderr_and_leaves_stdout_to_the_commands_answer(capfd):
    async def body():
        pool = RunnerPool(1)
        scheduler = make_scheduler(flows.prints, f"7{END}", runners=pool, runner="process")
        outcome = await asyncio.wait_for(scheduler.run(group_id(), task(), num=1, training=False), 20)
        await scheduler.close()
        await pool.close()
        return outcome

    assert asyncio.run(body()).group.rewards.tolist() == [1.0]
    printed = capfd.readouterr()
    assert "said by user code" not in printed.out
    assert "said by user code" in printed.err


def test_a_rollout_cancelled_before_its_process_heard_of_it_does_not_cost_that_process(house, monkeypatch):
    loop, pool = house
    bound = bind_workflow(flows.blocking, None)

    async def body():
        await fill(pool)
        before = pool.pids
        monkeypatch.setattr(pool, "_choose", lambda alone: None)  # all are busy
        waiting = asyncio.create_task(pool.run(bound, task(), SimpleNamespace(name="x"), None, lambda: None))
        await asyncio.sleep(0)
        monkeypatch.undo()
        pool._assign()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()
        await asyncio.sleep(0.3)  # three times what is left to a rollout before its process is killed
        return before, pool.pids, [dict(runner.runs) for runner in pool._runners]

    before, after, left = loop.run(body())
    assert after == before
    assert left == [{}, {}]


def test_bools_from_a_process_are_numbers(house):
    outcome, _, _, _ = run(house, flows.notes_what_is_no_float, num=1, retries=0)
    (row,) = outcome.group.experiences
    assert (row.reward, row.reward_parts, row.turns[0].reward) == (1.0, {"style": 1.0}, 1.0)
    assert row.metrics == {"correct": 1.0, "seen": 1.0}


@pytest.mark.parametrize("mistake", ["state", "message"])
def test_a_value_of_the_wrong_type_fails_its_rollout_and_none_beside_it(mistake):
    async def body():
        pool = RunnerPool(1, grace_s=20.0, block_s=20.0)  # a busy machine is given time
        wrong, healthy = (
            make_scheduler(flow, f"7{END}", runners=pool, runner="process", retries=0)
            for flow in (flows.notes_what_is_no_float, flows.waits_a_little)
        )
        outcomes = await asyncio.gather(
            healthy.run(group_id(), task(), num=4), wrong.run(group_id(mistake), task(mistake), num=2)
        )
        assert len(pool.pids) == 1
        await pool.close()
        return outcomes

    fine, failed = asyncio.run(asyncio.wait_for(body(), 60))
    assert (fine.refund, fine.num_failed) == (None, 0)
    assert [failure["boundary"] for failure in failed.failures] == ["workflow", "workflow"]
    assert "Expected `" in failed.failures[0]["error"]
