"""From sessions to experiences: a whole group's columns are written at once and each experience is a view of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from triune.explorer.session import Branch, Session
from triune.ports import Reward
from triune.records import Experience, ExperienceId, Stop, Turn

_NOTHING: Mapping[str, float] = {}


class Finished(msgspec.Struct, kw_only=True):
    """The attempt of a member that counts: its session and what its workflow returned."""

    session: Session
    reward: Reward | None = None
    stop: Stop | None = None
    info: dict[str, Any] = {}
    experiences: list[Experience] | None = None
    seconds: float = 0.0

    @property
    def is_valid(self) -> bool:
        """Whether the rollout enters statistics."""
        return self.experiences is not None or (self.reward is not None and self.reward.is_valid)


def build_experiences(finished: Sequence[Finished]) -> list[Experience]:
    """Experiences of all members, in order of member and branch.

    Args:
        finished: Attempts that ended, with or without a reward.

    Returns:
        One experience per branch; members whose workflow returned experiences contribute those.
    """
    rows = [(one, number, branch) for one in finished if one.experiences is None for number, branch in _branches(one)]
    columns = _columns([branch for _, _, branch in rows])
    built: dict[int, list[Experience]] = {}
    for (one, number, branch), column in zip(rows, columns, strict=True):
        member = one.session.rollout.member
        built.setdefault(member, []).append(_experience(one, number, branch, column))
    for one in finished:
        if one.experiences is not None:
            built[one.session.rollout.member] = one.experiences
    return [row for member in sorted(built) for row in built[member]]


def _branches(one: Finished) -> list[tuple[int, Branch]]:
    return [(number, branch) for number, branch in enumerate(one.session.branches) if branch.length]


def _columns(branches: Sequence[Branch]) -> list[tuple[Any, ...]]:
    """(tokens, mask, logprobs, versions, raw_logprobs or None) of each branch, views of one array per stream."""
    parts = [part for branch in branches for part in branch.parts]
    if not parts:
        return []
    tokens = np.concatenate([part[0] for part in parts])
    total = len(tokens)
    mask = np.zeros(total, dtype=np.bool_)
    logprobs = np.full(total, np.nan, dtype=np.float32)
    versions = np.full(total, -1, dtype=np.int32)
    views, start = [], 0
    for branch in branches:
        first, differs = start, False
        for ids, completion in branch.parts:
            stop = start + len(ids)
            if completion is not None:
                mask[start:stop] = True
                logprobs[start:stop] = completion.logprobs
                versions[start:stop] = completion.versions
                if completion.raw_logprobs is not None:
                    differs = True
            start = stop
        raw = _raw_logprobs(branch) if differs else None
        views.append((tokens[first:start], mask[first:start], logprobs[first:start], versions[first:start], raw))
    return views


def _raw_logprobs(branch: Branch) -> Any:
    """float32[T]: untruncated log-probs; those of turns without truncation are the sampled ones."""
    found = np.full(branch.length, np.nan, dtype=np.float32)
    start = 0
    for ids, completion in branch.parts:
        if completion is not None:
            plain = completion.raw_logprobs is None
            found[start : start + len(ids)] = completion.logprobs if plain else completion.raw_logprobs
        start += len(ids)
    return found


def _experience(one: Finished, number: int, branch: Branch, column: tuple[Any, ...]) -> Experience:
    session, reward = one.session, one.reward
    tokens, mask, logprobs, versions, raw = column
    is_valid = reward is not None and reward.is_valid
    metrics = session.metrics or _NOTHING
    if reward is not None and reward.metrics:
        metrics = {**metrics, **reward.metrics}
    return Experience(
        id=ExperienceId(session.rollout, number),
        tokens=tokens,
        action_mask=mask,
        logprobs=logprobs,
        versions=versions,
        temperature=_temperature(branch),
        raw_logprobs=raw,
        turns=_turns(session, branch),
        reward=reward.total if reward is not None and is_valid else None,
        reward_parts=reward.parts if reward is not None else _NOTHING,
        is_valid=is_valid,
        stop=one.stop or session.stop or branch.turns[-1][3],
        metrics=metrics,
        info=one.info,
        messages=branch.messages,
        tools=branch.tools,
    )


def _turns(session: Session, branch: Branch) -> tuple[Turn, ...]:
    notes = session.turn_rewards
    if not notes:
        return tuple([Turn(start=start, stop=stop, stop_reason=why) for _, start, stop, why, _ in branch.turns])
    return tuple(
        Turn(start=start, stop=stop, stop_reason=why, reward=noted[0], state_key=noted[1])
        for number, start, stop, why, _ in branch.turns
        for noted in [notes.get(number, (None, None))]
    )


def _temperature(branch: Branch) -> Any:
    """One number, or float32[T] when the turns differ."""
    first = branch.turns[0][4]
    if len(branch.turns) == 1 or all(turn[4] == first for turn in branch.turns):
        return first
    found = np.full(branch.length, first, dtype=np.float32)
    for _, start, stop, _, temperature in branch.turns:
        found[start:stop] = temperature
    return found
