"""The reward: numbers, differences, the same for the same answer, and not slower than the rollouts."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from triune.records import Experience, Task
from triune.selfcheck.report import Verdict, check, failed, passed, skipped, warned
from triune.selfcheck.rig import Rig
from triune.tasks import Scorer

SCORED = 16
"""Answers that are scored again at most: a reward may cost something."""

SLOW_S = 0.05
"""Seconds per call below which a reward is never called slow."""

NO_REWARD = "the algorithm imitates answers and looks at no reward"
OWN_REWARD = "the workflow scores itself, so the reward cannot be called alone"


@dataclass(frozen=True, kw_only=True)
class Scored:
    """An answer that was scored in a rollout."""

    task: Task
    answer: str
    row: Experience
    scorer: Scorer
    is_whole: bool  # the reward was given exactly this answer


async def scored(rig: Rig) -> list[Scored]:
    """The last answer of every rollout whose reward is a function of it, a few of every group."""
    found: list[list[Scored]] = []
    for one in await rig.groups():
        bound = rig.find_workflow(one.raw.task)
        if bound.scorer is None:
            continue
        members = []
        for rows in one.raw.members.values():
            row = rows[-1]
            if row.messages and row.messages[-1].get("role") == "assistant":
                answer = str(row.messages[-1].get("content") or "")
                members.append(
                    Scored(task=one.raw.task, answer=answer, row=row, scorer=bound.scorer,
                           is_whole=bound.is_ours or hasattr(bound.workflow, "messages"))
                )  # fmt: skip
        found.append(members)
    share = max(SCORED // max(len(found), 1), 2)
    return [each for members in found for each in members[: None if _is_per_group(members) else share]]


def _is_per_group(members: Sequence[Scored]) -> bool:
    return bool(members) and members[0].scorer.per_group


@check("reward_validity", "the reward gives a finite number for every answer")
async def reward_validity(rig: Rig) -> Verdict:
    """Count rollouts whose reward failed."""
    if rig.is_imitation:
        return skipped(NO_REWARD)
    rows = await rig.experiences()
    lost = [failure for failure in rig.failures if failure.startswith("reward:")]
    invalid = [row for row in rows if not row.is_valid or row.reward is None or not math.isfinite(row.reward)]
    if lost or invalid:
        num = max(len(lost), len({row.id.rollout for row in invalid}))
        total = len({row.id.rollout for row in rows})
        why = lost[0].removeprefix("reward: ") if lost else f"{invalid[0].id} has reward {invalid[0].reward}"
        return failed(
            f"{num} of {total} rollouts have no reward: {why}",
            "return a finite number for any text a model may write; such rollouts leave the statistics",
            invalid_ratio=num / max(total, 1),
        )
    return passed(f"{len(rows)} finite rewards", num_rewards=len(rows))


@check("reward_spread", "rewards differ within groups, so that there is something to learn")
async def reward_spread(rig: Rig) -> Verdict:
    """Look for a group whose members were not all worth the same."""
    if rig.is_imitation:
        return skipped(NO_REWARD)
    raws = [one.raw for one in await rig.groups()]
    rewards = [raw.rewards for raw in raws if len(raw.rewards)]
    every = [float(reward) for some in rewards for reward in some]
    if not every:
        return skipped("no rollout has a reward; see `reward_validity`")
    compares = getattr(rig.algorithm.advantage, "least_group", 1) > 1
    flat = sum(len(set(some.tolist())) == 1 for some in rewards)
    mean = sum(every) / len(every)
    low, high = min(every), max(every)
    numbers = {"mean": mean, "flat_group_ratio": flat / len(rewards)}
    if low == high or (compares and flat == len(rewards)):
        cause = f"every rollout got {low:g}" if low == high else "all members of every group got the same reward"
        return warned(
            f"{cause} ({len(every)} rollouts of {len(rewards)} tasks): groups without a difference teach nothing",
            "choose tasks that this model solves now and then, give partial credit, or check that the reward reads "
            "the answer as the model writes it",
            **numbers,
        )
    return passed(
        f"rewards from {low:g} to {high:g}, mean {mean:.3g}; {flat} of {len(rewards)} groups without a difference",
        **numbers,
    )


@check("reward_order", "the same answer is worth the same, whatever was scored before it")
async def reward_order(rig: Rig) -> Verdict:
    """Score the rollouts' answers twice, the second time in another order."""
    if rig.is_imitation:
        return skipped(NO_REWARD)
    answers = await scored(rig)
    if not answers:
        return skipped(OWN_REWARD)
    first = await _score_all(answers)
    again = (await _score_all(answers[::-1]))[::-1]
    for one, before, after in zip(answers, first, again, strict=True):
        if before != after:
            return failed(
                f"{_where(one)} got {before:g}, and {after:g} when the same answers were scored in another order",
                "a reward must depend on task and answer only: keep no state between calls, and draw no random numbers",
            )
        recorded = one.row.reward
        if one.is_whole and recorded is not None and one.row.is_valid and recorded != before:
            return failed(
                f"{_where(one)} got {recorded:g} in its rollout and {before:g} when it was scored again",
                "a reward must depend on task and answer only; a judge needs temperature 0",
            )
    return passed(f"{len(answers)} answers got the same reward in another order", num_answers=len(answers))


async def _score_all(answers: Sequence[Scored]) -> list[float]:
    """Totals in the order of the answers; whole groups where the reward compares."""
    totals: list[float] = []
    place = 0
    while place < len(answers):
        one = answers[place]
        if not one.scorer.per_group:
            reward = await one.scorer.score(one.task, one.answer, messages=one.row.messages, experience=one.row)
            totals.append(reward.total)
            place += 1
            continue
        same = [each for each in answers[place:] if each.task is one.task]
        rewards = await one.scorer.score_group(
            one.task,
            [each.answer for each in same],
            messages=[each.row.messages for each in same],
            experiences=[each.row for each in same],
        )
        totals += [reward.total for reward in rewards]
        place += len(same)
    return totals


@check("reward_speed", "scoring takes less time than sampling")
async def reward_speed(rig: Rig) -> Verdict:
    """Time single calls, after the first ones have loaded whatever there is to load."""
    if rig.is_imitation:
        return skipped(NO_REWARD)
    answers = await scored(rig)
    if not answers:
        return skipped(OWN_REWARD)
    num = len({row.id.rollout for row in await rig.experiences()})
    sampling = rig.sampling_s / max(num, 1)
    await _score_all(_first_group(answers))
    began, counted = time.perf_counter(), _first_group(answers[::-1])[::-1][:4] or answers[:1]
    if counted[0].scorer.per_group:
        counted = _first_group(answers)
    await _score_all(counted)
    await asyncio.sleep(0)
    seconds = (time.perf_counter() - began) / len(counted)
    numbers = {"seconds_per_call": seconds, "seconds_per_rollout": sampling}
    if seconds > SLOW_S and seconds > 0.5 * sampling:
        return warned(
            f"the reward takes {seconds:.2g} s a call, a rollout {sampling:.2g} s: the run would wait for its reward",
            "make it async so that calls overlap, cache what it loads, or score in the workflow while others sample",
            **numbers,
        )
    return passed(f"{seconds * 1000:.2g} ms a call, beside {sampling * 1000:.3g} ms for a rollout", **numbers)


def _first_group(answers: Sequence[Scored]) -> list[Scored]:
    return [each for each in answers if each.task is answers[0].task]


def _where(one: Scored) -> str:
    return f"reward {one.scorer.name} on task {one.task.taskset}/{one.task.key}: the answer {_short(one.answer)!r}"


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "…"
