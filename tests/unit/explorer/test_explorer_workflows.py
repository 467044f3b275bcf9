"""Workflows as users write them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from explorer_fakes import make_scheduler, run_group

from triune.errors import ConfigError, EngineError, RewardError
from triune.explorer import Model, bind_workflow
from triune.explorer.workflows.multi_turn import MultiTurn, Step
from triune.explorer.workflows.single_turn import SingleTurn
from triune.ports import Reward
from triune.records import Stop, Task
from triune.registry import brick

END = "<|im_end|>"


@brick("workflow", "guess_number")
@dataclass(frozen=True, kw_only=True)
class GuessNumber:
    """The model guesses a number; the environment says higher or lower."""

    max_turns: int = 6
    turn_cost: float = 0.1  # reward lost per wrong guess

    async def __call__(self, task: Task, model: Model) -> float:
        answer, high = task.data["answer"], task.data["high"]
        chat = model.chat(system="Reply with one whole number and nothing else.")
        hint = f"Guess my number between 1 and {high}."
        for wrong in range(self.max_turns):
            guess = await chat.ask(hint, parse=int)
            if guess == answer:
                return 1.0 - self.turn_cost * wrong
            hint = "Not a number." if guess is None else "Higher." if guess < answer else "Lower."
        return 0.0


def test_the_guessing_game_of_the_design_runs_as_it_is_printed():
    guesses = iter(["50", "no idea", " 75 "])
    outcome = run_group(
        make_scheduler(GuessNumber(), lambda request, text: next(guesses) + END), 1, answer=75, high=100
    )
    (row,) = outcome.group.experiences
    assert row.reward == pytest.approx(0.8)
    assert len(row.turns) == 3
    assert row.metrics["parse_errors"] == 1.0
    assert [m["content"] for m in row.messages if m["role"] == "user"] == [
        "Guess my number between 1 and 100.",
        "Higher.",
        "Not a number.",
    ]


def reward_is_length(task, answer):
    return float(len(answer))


def test_single_turn_scores_the_answer_with_the_reward_of_the_task_set():
    outcome = run_group(make_scheduler(SingleTurn(), "12345" + END, reward_is_length), 3)
    assert outcome.group.rewards.tolist() == [5.0, 5.0, 5.0]
    assert outcome.refund is None


async def plain_async(task, model):
    return (await model.generate([{"role": "user", "content": "x"}])).text == "7"


def plain(task, model, reward):
    first = model.chat().ask("x")
    return reward(task, first)


def test_plain_functions_may_be_async_or_not():
    assert run_group(make_scheduler(plain_async, "7" + END)).group.rewards.tolist() == [1.0, 1.0]
    assert run_group(make_scheduler(plain, "77" + END, reward_is_length)).group.rewards.tolist() == [2.0, 2.0]


async def async_reward(task, answer):
    return {"total": 2.0, "format": 1.0}


def test_a_reward_may_be_async_and_have_parts():
    (row, _) = run_group(make_scheduler(SingleTurn(), "1" + END, async_reward)).group.experiences
    assert row.reward == 2.0
    assert row.reward_parts == {"format": 1.0}


def rank_by_length(task, answers):
    return [float(sorted(map(len, answers)).index(len(a))) for a in answers]


def test_a_group_reward_sees_all_answers_at_once():
    said = iter(["1", "333", "22"])
    outcome = run_group(make_scheduler(SingleTurn(), lambda request, text: next(said) + END, rank_by_length), 3)
    assert outcome.group.rewards.tolist() == [0.0, 2.0, 1.0]


def test_a_group_reward_does_not_wait_for_a_member_that_failed():
    said = iter([ValueError("gone"), "333" + END, "22" + END])
    scheduler = make_scheduler(SingleTurn(), lambda request, text: next(said), rank_by_length, retries=0, min_group=2)
    outcome = run_group(scheduler, 3)
    assert outcome.group.rewards.tolist() == [1.0, 0.0]


def test_a_member_that_fails_after_its_group_was_scored_is_not_scored_alone():
    seen, again = [], []

    def rank(task, answers):
        seen.append(list(answers))
        return rank_by_length(task, answers)

    async def fails_late(task, model, reward):
        answer = await model.chat().ask("x")
        value = await reward(task, answer)
        if answer == "333":
            raise ValueError("late")
        if answer == "22":
            with pytest.raises(RewardError, match="asks for its group's reward again") as caught:
                await reward(task, answer)
            again.append(caught)
        return value

    said = iter(["1", "333", "22"])
    scheduler = make_scheduler(fails_late, lambda request, text: next(said) + END, rank, retries=1, min_group=2)
    outcome = run_group(scheduler, 3)
    assert (seen, len(again)) == ([["1", "333", "22"]], 1)
    assert [row.reward for row in outcome.group.experiences] == [0.0, None, 1.0]


def test_a_group_that_could_not_be_scored_is_scored_together_when_it_is_tried_again():
    seen = []

    async def judged(task, answers):
        seen.append(len(answers))
        if len(seen) == 1:
            raise EngineError("judge", "nobody answers")
        return [1.0] * len(answers)

    async def one_after_the_other(task, model, reward):
        started.append(1)
        await asyncio.sleep(0.03 * max(0, len(started) - 3))  # only those that are tried again
        return await reward(task, await model.chat().ask("x"))

    started = []
    outcome = run_group(make_scheduler(one_after_the_other, "1" + END, judged, retries=1), 3)
    assert (seen, outcome.refund) == ([3, 3], None)


def test_a_group_reward_gets_as_many_experiences_as_answers():
    async def asks_or_not(task, model, reward):
        asked.append(1)
        return await reward(task, await model.chat().ask("x") if len(asked) != 2 else "made up")

    def both(task, answers, experiences):
        return [float(len(row.tokens) > len(answer)) for answer, row in zip(answers, experiences, strict=True)]

    asked = []
    outcome = run_group(make_scheduler(asks_or_not, "1" + END, both, retries=0, min_group=2), 3)
    assert outcome.group.rewards.tolist() == [1.0, 1.0]
    assert "without asking the model" in outcome.failures[0]["error"]


def test_a_reward_that_a_workflow_ignores_is_refused():
    with pytest.raises(ConfigError, match="would do nothing"):
        bind_workflow(plain_async, reward_is_length)
    with pytest.raises(ConfigError, match="scores with a reward and there is none"):
        bind_workflow(SingleTurn())


class Corridor:
    """Walk three steps right; every step costs."""

    def __init__(self, length: int = 3) -> None:
        self.length, self.at = length, 0

    def reset(self, task):
        return "you stand at 0"

    async def step(self, action):
        self.at += action == "right"
        done = self.at == self.length
        return Step(
            observation=f"you stand at {self.at}", reward=1.0 if done else -0.1, is_done=done, state_key=str(self.at)
        )


def test_an_environment_is_played_and_each_turn_keeps_its_reward():
    workflow = MultiTurn(environment=f"{__name__}:Corridor", fields={"length": 2})
    (row,) = run_group(make_scheduler(workflow, "right" + END), 1).group.experiences
    assert row.reward == pytest.approx(0.9)
    assert [(t.reward, t.state_key) for t in row.turns] == [(-0.1, "start"), (1.0, "1")]
    assert row.stop is Stop.DONE


class Unnamed(Corridor):
    """The same, without names for its states."""

    async def step(self, action):
        return msgspec.structs.replace(await super().step(action), state_key=None)


def test_turns_of_an_environment_that_names_no_states_have_no_key():
    workflow = MultiTurn(environment=f"{__name__}:Unnamed", fields={"length": 2})
    (row,) = run_group(make_scheduler(workflow, "right" + END), 1).group.experiences
    assert [turn.state_key for turn in row.turns] == [None, None]


def test_case_60_an_episode_that_runs_out_of_turns_says_so():
    workflow = MultiTurn(environment=f"{__name__}:Corridor", max_turns=2)
    outcome = run_group(make_scheduler(workflow, "left" + END), 1)
    assert outcome.group.experiences[0].stop is Stop.MAX_TURNS
    assert outcome.metrics["truncated_ratio"] == 1.0


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def with_tools(task, model):
    return Reward(total=float((await model.chat(tools=[add]).ask("3+4?", parse=int)) == 7))


def test_case_17_a_malformed_tool_call_becomes_an_observation_and_a_metric():
    call = '<tool_call>{"name": "add", "arguments": %s}</tool_call>'
    said = iter([call % "{3, 4", call % '{"a": 3}', call % '"{\\"a\\": 3, \\"b\\": 4}"', "7"])
    outcome = run_group(make_scheduler(with_tools, lambda request, text: next(said) + END), 1)
    (row,) = outcome.group.experiences
    observed = [m["content"] for m in row.messages if m["role"] == "tool"]
    assert "cannot be read" in observed[0]
    assert "missing a required argument" in observed[1]
    assert observed[2] == "7"
    assert row.reward == 1.0
    assert outcome.metrics["malformed_tool_calls"] == 1.0
    assert outcome.metrics["tool_errors"] == 1.0


async def own_experiences(task, model):
    await model.generate([{"role": "user", "content": "x"}])
    from triune.records import Experience, ExperienceId, RolloutId, Source
    from triune.records.ids import GroupId

    n = 4
    return [
        Experience(
            id=ExperienceId(RolloutId(GroupId("x", "x", "x", 0), 0)),
            tokens=np.arange(n, dtype=np.int32),
            action_mask=np.array([False, False, True, True]),
            logprobs=np.full(n, np.nan, np.float32),
            versions=np.full(n, -1, np.int32),
            reward=0.5,
            source=Source.EXPERT,
        )
    ]


@pytest.mark.parametrize(
    "changes",
    [{"reward": "good"}, {"reward": np.ones(2)}, {"tokens": None}, {"turns": None}, {"info": {"at": object()}}],
)
def test_case_35_experiences_with_fields_of_the_wrong_type_are_invalid_at_once_and_named(changes):
    async def workflow(task, model):
        (first, *_) = await own_experiences(task, model)
        return [first.replace(**changes)]

    outcome = run_group(make_scheduler(workflow, rollout_timeout_s=5.0, retries=0), 1)
    assert [failure["boundary"] for failure in outcome.failures] == ["reward"]
    assert "malformed" in outcome.failures[0]["error"]


@pytest.mark.parametrize(
    "fields",
    [{"total": "1"}, {"total": None}, {"total": 1.0, "parts": {"style": "good"}}, {"total": 1.0, "parts": None},
     {"total": 1.0, "parts": {"style": float("nan")}}, {"total": 1.0, "metrics": {"style": "good"}}],
    ids=str,
)  # fmt: skip
def test_case_35_a_reward_with_fields_of_the_wrong_type_makes_its_rollout_invalid_and_nothing_else(fields):
    async def workflow(task, model):
        await model.chat().ask("x")
        return Reward(**fields)

    outcome = run_group(make_scheduler(workflow, "7" + END, rollout_timeout_s=5.0, retries=0), 1)
    assert [failure["boundary"] for failure in outcome.failures] == ["reward"]
    assert "train/k" in outcome.failures[0]["error"]


def test_a_group_reward_whose_judge_is_gone_fails_its_rollouts_at_once():
    async def judged(task, answers):
        raise EngineError("judge", "nobody answers")

    began = time.monotonic()
    outcome = run_group(make_scheduler(SingleTurn(), "1" + END, judged, rollout_timeout_s=5.0, retries=0))
    assert [failure["boundary"] for failure in outcome.failures] == ["engine", "engine"]
    assert time.monotonic() - began < 2


def test_a_workflow_may_return_experiences_of_its_own():
    outcome = run_group(make_scheduler(own_experiences))
    assert [str(row.id) for row in outcome.group.experiences] == [
        "run/train/k/0/0.0/main.agent.0",
        "run/train/k/0/1.0/main.agent.0",
    ]
    assert outcome.group.rewards.tolist() == [0.5, 0.5]
