"""Built-in rewards, and what user functions may look like and return."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import numpy as np
import pytest

from triune import registry
from triune.errors import ConfigError, RewardError
from triune.ports import Reward
from triune.records import Task
from triune.tasks import as_reward, to_reward
from triune.tasks.rewards.last_number import last_number
from triune.tasks.verifiers import VerifierFailed, Verifiers


def task_with(answer, **more) -> Task:
    return Task(key="t7", data={"answer": answer, **more}, taskset="train")


def score(spec, truth, answer, **more) -> Reward:
    scorer = as_reward(registry.build("reward", spec, "reward") if isinstance(spec, str | dict) else spec)
    return asyncio.run(scorer.score(task_with(truth, **more), answer))


# --------------------------------------------------------------------------------------------- simple rewards


def test_exact_match_forgives_white_space_only():
    assert score("exact_match", "46", " 46\n").total == 1.0
    assert score("exact_match", 46, "46").total == 1.0
    assert score("exact_match", "46", "46.").total == 0.0
    assert score("exact_match", "Paris", "paris").total == 0.0
    assert score({"use": "exact_match", "ignore_case": True}, "Paris", "paris").total == 1.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("she pays $1,250.", 1250),
        ("5-8=-3", -3),
        ("12-34", 34),
        ("x = -0.5 or so", -0.5),
        ("#### 42", 42),
        ("1,2,3", 3),
        ("about .75", 0.75),
        ("3.14.", 3.14),
        ("none", None),
        ("", None),
        ("2) 17%", 17),
        ("1.5 and 2,000,000", 2_000_000),
        ("v2", 2),
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == number


def test_last_number_compares_numbers_not_text():
    assert score("last_number", "…so #### 1,000", "The answer is 1000.0").total == 1.0
    assert score("last_number", "10", "11, no, 10, no, 12").total == 0.0
    assert score({"use": "last_number", "tolerance": 0.01}, "3.14159", "3.14").total == 1.0
    assert score("last_number", "3", "no idea").total == 0.0
    with pytest.raises(RewardError, match="last_number on task train/t7: field 'answer' is 'many'"):
        score("last_number", "many", "3")


def test_format_matches_the_whole_answer_or_somewhere():
    pattern = r"<think>.+</think>\s*<answer>.+</answer>"
    text = "<think>a\nb</think>\n<answer>1</answer>"
    assert score({"use": "format", "pattern": pattern}, "", text).total == 1.0
    assert score({"use": "format", "pattern": pattern}, "", text + " and more").total == 0.0
    assert score({"use": "format", "pattern": pattern, "match": "anywhere"}, "", text + " and more").total == 1.0
    with pytest.raises(ConfigError, match=r"format\.pattern: .*expected a regular expression"):
        registry.build("reward", {"use": "format", "pattern": "("}, "reward")


def test_case_33_a_pattern_that_would_match_for_ever_is_given_up_at_its_bound_and_stops_nothing_else():
    spec = {"use": "format", "pattern": r"<think>(.|\n)*</think>.*", "timeout_s": 0.3}
    scorer = as_reward(registry.build("reward", spec, "reward"))

    async def both():
        calls = [scorer.score(task_with(""), "<think>" + "a\n" * 40), scorer.score(task_with(""), "<think>a</think>b")]
        ticks = 0
        work = asyncio.gather(*calls, return_exceptions=True)
        while not work.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return *work.result(), ticks

    endless, easy, ticks = asyncio.run(asyncio.wait_for(both(), 20))
    assert isinstance(endless, RewardError)
    assert "format on task train/t7" in str(endless)
    assert r"no verdict within 0.3 s" in str(endless)
    assert easy.total == 1.0
    assert ticks > 5


def test_a_task_without_reference_is_named_with_the_nearest_field():
    with pytest.raises(RewardError, match=r"exact_match on task train/t7: its data has no field 'anwser'.*'answer'"):
        score({"use": "exact_match", "key": "anwser"}, "1", "1")


# ----------------------------------------------------------------------------------------------- math-verify


def test_math_verify_sees_equal_values_in_other_forms():
    assert score("math_verify", r"\frac{1}{2}", r"Therefore \boxed{0.5}.").total == 1.0
    assert score("math_verify", "$x^2+2x+1$", r"$(x+1)^2$").total == 1.0
    assert score("math_verify", "12", r"The answer is \boxed{13}").total == 0.0
    wordy = score("math_verify", "12", "I do not know.")
    assert (wordy.total, wordy.metrics["answer_found"]) == (0.0, 0.0)


def test_case_33_math_verify_works_in_a_worker_thread():
    import threading

    found = []
    thread = threading.Thread(target=lambda: found.append(score("math_verify", "1/2", "$0.50$").total))
    thread.start()
    thread.join()
    assert found == [1.0]


HANGS = r"$9^{9^{9^{9}}}$"


def test_case_33_a_hanging_expression_is_killed_at_the_bound_and_its_slot_comes_back():
    pool = Verifiers(1)
    easy = {"verifier": "math", "truth": "2", "answer": "$2$"}

    async def verify() -> tuple[float, int, int]:
        await pool.verify(easy, 5.0)
        before = pool._workers[0]._process
        start = time.monotonic()
        with pytest.raises(VerifierFailed, match=r"no verdict within 0\.5 s"):
            await pool.verify({**easy, "answer": HANGS}, 0.5)
        took = time.monotonic() - start
        assert before.poll() == -9, "the process really is dead"
        assert (await pool.verify(easy, 5.0))["score"] == 1.0
        return took, before.pid, pool._workers[0]._process.pid

    took, old, new = asyncio.run(verify())
    pool.close()
    assert 0.5 <= took < 1.5
    assert old != new
    assert pool._workers[0]._process is None


def test_case_33_the_bound_holds_for_each_of_many_waiting_requests():
    spec = {"use": "math_verify", "timeout_s": 0.4, "workers": 2}
    scorer = as_reward(registry.build("reward", spec, "reward"))

    async def gather():
        answers = [HANGS, "$2$", HANGS, "$2$", "$3$"]
        calls = (scorer.score(task_with("two=$2$"), answer) for answer in answers)
        return await asyncio.gather(*calls, return_exceptions=True)

    kinds = [result.total if isinstance(result, Reward) else type(result) for result in asyncio.run(gather())]
    assert kinds == [RewardError, 1.0, RewardError, 1.0, 0.0]


def test_case_34_a_verifier_that_fails_is_an_error_and_not_zero():
    with pytest.raises(RewardError, match="math_verify on task train/t7: the reference answer '' is no mathematics"):
        score("math_verify", "", "$2$")


def test_case_34_a_worker_that_dies_is_an_error_and_the_next_request_gets_another():
    pool = Verifiers(1)
    easy = {"verifier": "math", "truth": "2", "answer": "$2$"}

    async def verify():
        await pool.verify(easy, 5.0)
        pool._workers[0]._process.kill()
        pool._workers[0]._process.wait()
        return await pool.verify(easy, 5.0)

    assert asyncio.run(verify())["score"] == 1.0
    pool.close()


# --------------------------------------------------------------------------------------------- reasoning gym


def test_reasoning_gym_scores_and_survives_free_text():
    pytest.importorskip("reasoning_gym")
    from triune.tasks import TaskBricks, TasksSettings, open_tasksets

    async def scores():
        found = {}
        for generator in ("chain_sum", "leg_counting", "rush_hour"):
            raw = {"use": "reasoning_gym", "generator": generator, "size": 3}
            opened = open_tasksets(TasksSettings.model_validate(raw), seed=0)[0]
            task, scorer = opened.tasks([1])[0], TaskBricks([opened]).reward
            own = [await scorer(task).score(task, text) for text in (task.data["answer"] or "", "{", "I [give] up (")]
            found[generator] = [reward.total for reward in own]
        return found

    found = asyncio.run(scores())
    assert found["chain_sum"][0] == found["leg_counting"][0] == 1.0
    assert all(0.0 <= value < 1.0 for values in found.values() for value in values[1:])


def test_case_34_a_broken_scorer_is_an_error_but_free_text_it_cannot_read_is_zero(monkeypatch):
    from triune.tasks import generators

    class Fussy:
        def __init__(self, broken):
            self.broken = broken

        def __getitem__(self, number):
            return {"answer": "5"}

        def score_answer(self, answer, row):
            if self.broken:
                raise KeyError("bug")
            return float(int(answer) == 5)

    recipe = generators.Recipe(generator="x", options={}, seed=0, size=1)
    monkeypatch.setattr(generators, "_load", lambda _: Fussy(False))
    monkeypatch.setattr(generators, "_row", lambda *_: {"answer": "5"})
    assert generators.score(recipe, 0, "5") == (1.0, False)
    assert generators.score(recipe, 0, "five") == (0.0, True)
    monkeypatch.setattr(generators, "_load", lambda _: Fussy(True))
    with pytest.raises(KeyError):
        generators.score(recipe, 0, "5")


# -------------------------------------------------------------------------------------------------- weighted


def test_case_36_weighted_keeps_raw_parts_and_weighted_shares_beside_the_total():
    spec = {
        "use": "weighted",
        "parts": {
            "correct": {"use": "exact_match", "weight": 2.0},
            "form": {"use": "format", "pattern": r"\d+", "weight": 0.5},
            "number": "last_number",
        },
    }
    right = score(spec, "46", "46")
    assert (right.total, right.parts) == (3.5, {"correct": 1.0, "form": 1.0, "number": 1.0})
    shaped = score(spec, "46", "47")
    assert (shaped.total, shaped.parts) == (0.5, {"correct": 0.0, "form": 1.0, "number": 0.0})
    assert shaped.metrics == {"weighted/correct": 0.0, "weighted/form": 0.5, "weighted/number": 0.0}


def test_weights_that_make_one_together_give_a_perfect_answer_one():
    parts = {name: {"use": "exact_match", "weight": weight} for name, weight in (("a", 0.7), ("b", 0.2), ("c", 0.1))}
    assert score({"use": "weighted", "parts": parts}, "46", "46").total == 1.0


def test_case_34_a_weighted_reward_is_invalid_when_a_part_is():
    spec = {"use": "weighted", "parts": {"form": {"use": "format", "pattern": ".*"}, "number": {"use": "last_number"}}}
    with pytest.raises(RewardError, match="last_number"):
        score(spec, "no number", "1")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, r"weighted\.parts: no parts"),
        ({"a": {"use": "exact_mach"}}, r"weighted\.parts\.a: .*did you mean 'exact_match'"),
        ({"a": {"use": "exact_match", "weight": "big"}}, r"weighted\.parts\.a\.weight: found 'big'"),
        ({"a": {"use": "exact_match", "wieght": 1}}, r"weighted\.parts\.a\.wieght: ExactMatch has no such field"),
    ],
)
def test_weighted_parts_are_checked_when_the_config_is_read(parts, message):
    with pytest.raises(ConfigError, match=message):
        registry.build("reward", {"use": "weighted", "parts": parts}, "tasks.reward")


# --------------------------------------------------------------------------------------------- user functions


def by_answer(task, answer):
    return len(answer)


def by_other_names(t, a):
    return len(a)


async def by_await(task, answer):
    await asyncio.sleep(0)
    return len(answer)


def by_completion(completion, **extra):
    return len(completion)


def by_messages(messages, answer, bonus=0.0):
    return len(messages) + len(answer) + bonus


@dataclass(frozen=True, kw_only=True)
class ByField:
    per_letter: float = 1.0

    def __call__(self, task: Task, answer: str) -> float:
        return self.per_letter * len(answer)


@pytest.mark.parametrize("function", [by_answer, by_other_names, by_await, by_completion, ByField()])
def test_user_rewards_are_called_by_their_signature(function):
    assert score(function, "", "four").total == 4.0


def test_user_rewards_get_what_they_ask_for_by_name():
    scorer = as_reward(by_messages)
    assert asyncio.run(scorer.score(task_with(""), "ab", messages=[{}, {}, {}])).total == 5.0


def test_user_rewards_are_found_by_import_path():
    assert score({"use": f"{__name__}:ByField", "per_letter": 0.5}, "", "four").total == 2.0
    assert score({"use": f"{__name__}:by_answer"}, "", "four").total == 4.0


def test_a_reward_with_answers_scores_the_whole_group_in_order():
    async def longest(task, answers):
        return np.array([len(answer) == max(map(len, answers)) for answer in answers])

    scorer = as_reward(longest)
    assert scorer.per_group
    rewards = asyncio.run(scorer.score_group(task_with(""), ["a", "abc", "ab"]))
    assert [reward.total for reward in rewards] == [0.0, 1.0, 0.0]
    for wrong in ([1.0], 1.0, "abc", None):
        with pytest.raises(RewardError, match="a list of 3 rewards"):
            asyncio.run(as_reward(lambda answers, wrong=wrong: wrong).score_group(task_with(""), ["a", "b", "c"]))
    with pytest.raises(RewardError, match="task train/t7, answer 1: returned nan"):
        asyncio.run(as_reward(lambda answers: [1, float("nan"), 2]).score_group(task_with(""), ["a", "b", "c"]))


@pytest.mark.parametrize(
    "function", [lambda: 1, lambda x: 1, lambda a, b, c: 1, lambda answer, answers: 1, lambda task: 1, 5]
)
def test_a_function_that_cannot_be_called_is_refused_when_the_config_is_read(function):
    with pytest.raises(ConfigError, match=r"reward .*expected|reward .*found"):
        as_reward(function)


def test_case_34_a_reward_that_raises_is_invalid_and_names_the_task():
    def broken(task, answer):
        return task.data["missing"]

    with pytest.raises(RewardError, match="reward broken on task train/t7: raised KeyError: 'missing'"):
        score(broken, "", "x")


class Tensor:
    """What a one-element tensor looks like, without torch."""

    def __init__(self, *values):
        self.values = values

    def numel(self):
        return len(self.values)

    def item(self):
        (value,) = self.values
        return value


@pytest.mark.parametrize(
    ("value", "total"),
    [
        (True, 1.0),
        (False, 0.0),
        (3, 3.0),
        (0.25, 0.25),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (np.array([0.5]), 0.5),
        (Tensor(0.5), 0.5),
    ],
)
def test_case_35_numbers_of_every_kind_are_converted(value, total):
    reward = to_reward(value, "here")
    assert reward == Reward(total=total)
    assert type(reward.total) is float


def test_case_35_mappings_are_parts_with_a_total():
    assert to_reward({"total": 1, "form": True}, "here") == Reward(total=1.0, parts={"form": 1.0})
    assert to_reward({"score": np.float64(0.5)}, "here") == Reward(total=0.5)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "1.0",
        float("nan"),
        float("inf"),
        np.float32("nan"),
        np.array([1.0, 2.0]),
        np.array([]),
        Tensor(1.0, 2.0),
        [1.0],
        {},
        {"form": 1.0, "length": 300},
        {"total": 1.0, "form": None},
        {"total": 1.0, "score": 1.0},
        {"total": float("nan")},
        Reward(total=float("nan")),
        Reward(total=1.0, parts={"a": float("inf")}),
        object(),
    ],
)
def test_case_35_anything_else_is_refused_with_the_task(value):
    with pytest.raises(RewardError, match="reward <lambda> on task train/t7"):
        score(lambda task, answer: value, "", "x")


def test_an_invalid_reward_stays_invalid():
    assert not score(lambda task, answer: Reward(total=float("nan"), is_valid=False), "", "x").is_valid
