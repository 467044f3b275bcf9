"""What makes a group a group: one task, many answers, each with chance of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from triune.records import Experience, Group
from triune.selfcheck.recorder import Call
from triune.selfcheck.report import Verdict, check, failed, passed, skipped
from triune.selfcheck.rig import Rig, experiences_of

UNLIKELY = 1e-6
"""Chance of equal answers below which they are no coincidence."""


@check("groups", "rewards are only compared within one task, and members of a group are sampled independently")
async def groups(rig: Rig) -> Verdict:
    """Look at identities, prompts, seeds, and whether the answers differ as their log-probs say they should."""
    if rig.is_imitation:
        return skipped("nothing is sampled: rows are not compared with each other")
    raws = [one.raw for one in await rig.groups()]
    calls_of = await rig.calls_of()
    for problem in (_identity(raws), _prompts(raws, calls_of), _seeds(calls_of)):
        if problem is not None:
            return problem
    problem = _answers(raws, calls_of)
    if problem is not None:
        return problem
    size = rig.config.algorithm.group_size
    num_different = [len({_said(rows) for rows in raw.members.values()}) for raw in raws]
    mean = sum(num_different) / max(len(num_different), 1)
    return passed(
        f"{len(raws)} groups of {size}, each of one task, {mean:.1f} different answers in a group",
        num_groups=len(raws),
        different_answers=mean,
    )


def _identity(raws: Sequence[Group]) -> Verdict | None:
    for raw in raws:
        for row in experiences_of(raw):
            if row.id.rollout.group != raw.id:
                return failed(
                    f"group {raw.id} holds {row.id}: rewards of different tasks would be compared",
                    "keep experiences in the group of their own task",
                )
        for member, rows in raw.members.items():
            if len({row.reward for row in rows}) > 1:
                return failed(
                    f"group {raw.id}: experiences of rollout {member} have different rewards", "one reward each"
                )
    return None


def _first_prompts(raw: Group, calls_of: Mapping[str, Sequence[Call]]) -> list[bytes]:
    names = {str(row.id.rollout) for row in experiences_of(raw)}
    return [calls_of[name][0].request.prompt.tobytes() for name in sorted(names) if calls_of.get(name)]


def _prompts(raws: Sequence[Group], calls_of: Mapping[str, Sequence[Call]]) -> Verdict | None:
    """No member may have been asked what another group was asked, unless its whole group was."""
    asked = {str(raw.id): _first_prompts(raw, calls_of) for raw in raws}
    for name, prompts in asked.items():
        if len(set(prompts)) < 2:
            continue
        for other, theirs in asked.items():
            shared = set(prompts) & set(theirs)
            if other != name and shared:
                return failed(
                    f"members of group {name} were asked different things, one of them the question of {other}: "
                    "group ids are mixed, so rewards of different tasks are compared",
                    "a group holds the rollouts of one task; look at what hands tasks to rollouts",
                )
    return None


def _seeds(calls_of: Mapping[str, Sequence[Call]]) -> Verdict | None:
    seen: dict[int, str] = {}
    for calls in calls_of.values():
        for call in calls:
            if call.request.sampling.temperature <= 0:
                continue
            if call.request.seed in seen:
                return failed(
                    f"calls {seen[call.request.seed]} and {call.request.id} were sampled with the same seed",
                    "every member and turn needs a seed of its own, or a group is one answer many times",
                )
            seen[call.request.seed] = call.request.id
    return None


def _answers(raws: Sequence[Group], calls_of: Mapping[str, Sequence[Call]]) -> Verdict | None:
    """Members may say the same by chance; how likely that is stands in their log-probs."""
    chance, num_equal = 1.0, 0
    for raw in raws:
        members = list(raw.members.values())
        if len(members) < 2:
            continue
        if len({_said(rows) for rows in members}) > 1:
            return None
        if any(call.request.sampling.temperature <= 0 for rows in members for call in _calls(rows, calls_of)):
            return None
        chance *= math.exp(min(_log_chance(members[0]), 0.0)) ** (len(members) - 1)
        num_equal += 1
    if num_equal and chance < UNLIKELY:
        return failed(
            f"all members of each of {num_equal} groups gave the same answer; by chance that happens once in "
            f"{1 / max(chance, 1e-300):.2g} times: sampling has no chance in it",
            "look at the engine: it seems to take the likeliest token whatever the temperature",
        )
    return None


def _calls(rows: Sequence[Experience], calls_of: Mapping[str, Sequence[Call]]) -> Sequence[Call]:
    return calls_of.get(str(rows[0].id.rollout), ())


def _log_chance(rows: Sequence[Experience]) -> float:
    return float(sum(np.nansum(row.logprobs[row.action_mask]) for row in rows))


def _said(rows: Sequence[Experience]) -> bytes:
    return b"".join(row.tokens[row.action_mask].tobytes() for row in rows)
