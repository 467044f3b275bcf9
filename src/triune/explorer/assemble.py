"""From sessions to experiences: a whole group's columns are written at once and each experience is a view of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from triune.explorer.session import Branch, Session
from triune.ports import Reward
from triune.records import Experience, ExperienceId, Stop, Turn


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
    tokens = np.concatenate([tokens for tokens, _ in parts], dtype=np.int32)
    lengths = [len(tokens) for tokens, _ in parts]
    mask = np.repeat([completion is not None for _, completion in parts], lengths)
    sampled = [completion for _, completion in parts if completion is not None]
    logprobs = np.full(len(tokens), np.nan, dtype=np.float32)
    versions = np.full(len(tokens), -1, dtype=np.int32)
    if sampled:
        logprobs[mask] = np.concatenate([completion.logprobs for completion in sampled])
        versions[mask] = np.concatenate([completion.versions for completion in sampled])
    raw = None
    if any(completion.raw_logprobs is not None for completion in sampled):
        raw = np.full(len(tokens), np.nan, dtype=np.float32)
        raw[mask] = np.concatenate([c.logprobs if c.raw_logprobs is None else c.raw_logprobs for c in sampled])
    views, start = [], 0
    for branch in branches:
        stop = start + branch.length
        here = slice(start, stop)
        differs = raw is not None and any(c is not None and c.raw_logprobs is not None for _, c in branch.parts)
        views.append((tokens[here], mask[here], logprobs[here], versions[here], raw[here] if differs else None))  # type: ignore[index]
        start = stop
    return views


def _experience(one: Finished, number: int, branch: Branch, column: tuple[Any, ...]) -> Experience:
    session, reward = one.session, one.reward
    tokens, mask, logprobs, versions, raw = column
    is_valid = reward is not None and reward.is_valid
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
        reward_parts=reward.parts if reward is not None else {},
        is_valid=is_valid,
        stop=one.stop or session.stop or branch.turns[-1][3],
        metrics=_metrics(session, reward),
        info=one.info,
        messages=branch.messages,
        tools=branch.tools,
    )


def _metrics(session: Session, reward: Reward | None) -> Mapping[str, float]:
    if reward is None or not reward.metrics:
        return session.metrics or {}
    return {**session.metrics, **reward.metrics} if session.metrics else reward.metrics


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
