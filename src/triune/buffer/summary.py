"""What the store indexes of a group, and the check at its door."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from triune.errors import RecordError
from triune.records import Experience, Group, Source, Text

INT32, FLOAT32, BOOL = np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.bool_)


class Summary(NamedTuple):
    """One row's worth of a group.

    Attributes:
        num_records: Experiences, pairs or texts.
        reward: Mean over rollouts whose reward is known and valid, each once; None when there is none.
        oldest_version: Over all action tokens; -1 when the policy sampled none.
        newest_version: Likewise.
        source: Of the first record.
        is_urgent: Whether a person made one of the records.
        is_waiting: Whether a valid rollout's reward is not known yet.
        score: Mean priority.
        attempts: `member.attempt` of every rollout, the identity of a put.
    """

    num_records: int
    reward: float | None
    oldest_version: int
    newest_version: int
    source: str
    is_urgent: bool
    is_waiting: bool
    score: float
    attempts: str


def summarise(group: Group) -> Summary:
    """Check a group and say what the store needs to know of it.

    Raises:
        RecordError: A record breaks its contract, belongs to another group, or a member is there in two attempts.
    """
    if not group.records:
        raise RecordError(str(group.id), "no records", "at least one", "refund the group instead")
    if isinstance(group.records[0], Experience):
        return _summarise_experiences(group)
    sources = [
        r.chosen.source if not isinstance(r, Text) and not isinstance(r, Experience) else Source.IMPORTED
        for r in group.records
    ]
    for record in group.records:
        for experience in () if isinstance(record, Text | Experience) else (record.chosen, record.rejected):
            experience.check()
    keys = ",".join(r.id if isinstance(r, Text) else str(n) for n, r in enumerate(group.records))
    return Summary(len(group), None, -1, -1, sources[0].value, Source.HUMAN in sources, False, 0.0, keys)


def _summarise_experiences(group: Group) -> Summary:
    rows = group.experiences
    oldest, newest = _check(rows)
    attempts: dict[int, int] = {}
    rewards: dict[int, float] = {}
    is_waiting = is_urgent = False
    score = 0.0
    for row in rows:
        rollout = row.id.rollout
        if rollout.group is not group.id and rollout.group != group.id:
            raise RecordError(str(row.id), f"a record in group {group.id}", "a record of that group")
        member = rollout.member
        if attempts.setdefault(member, rollout.attempt) != rollout.attempt:
            raise RecordError(f"{group.id}/{member}", "two attempts of one member", "at most one attempt is stored")
        if row.is_valid:
            if row.reward is None:
                is_waiting = True
            else:
                rewards[member] = row.reward
        is_urgent |= row.source is Source.HUMAN
        score += row.priority
    reward = math.fsum(rewards.values()) / len(rewards) if rewards else None
    keys = ",".join(f"{member}.{attempts[member]}" for member in sorted(attempts))
    num = len(rows)
    return Summary(num, reward, oldest, newest, rows[0].source.value, is_urgent, is_waiting, score / num, keys)


def _check(rows: tuple[Experience, ...]) -> tuple[int, int]:
    """`Experience.check` of all rows in one pass over their joined arrays; (oldest, newest) version."""
    bounds = _check_quickly(rows)
    if bounds is None:
        for row in rows:
            row.check()
        versions = [version for row in rows for version in row.versions[row.action_mask].tolist()]
        bounds = (min(versions), max(versions)) if versions else (-1, -1)
    return bounds


def _check_quickly(rows: tuple[Experience, ...]) -> tuple[int, int] | None:
    """(oldest, newest) version, or None when something may be wrong and the precise check has to say what."""
    offset, spans = 0, []
    for row in rows:
        length = len(row.tokens)
        if (
            (row.tokens.dtype, row.action_mask.dtype, row.logprobs.dtype, row.versions.dtype)
            != (INT32, BOOL, FLOAT32, INT32)
            or not len(row.action_mask) == len(row.logprobs) == len(row.versions) == length
            or row.raw_logprobs is not None
            or type(row.temperature) is not float
            or (row.reward is not None and not math.isfinite(row.reward))
            or any(len(stream) != length for stream in row.streams.values())
        ):
            return None
        for turn in row.turns:
            if not 0 <= turn.start <= turn.stop <= length:
                return None
            spans.append((offset + turn.start, offset + turn.stop))
        offset += length
    mask = np.concatenate([row.action_mask for row in rows])
    logprobs = np.concatenate([row.logprobs for row in rows])
    versions = np.concatenate([row.versions for row in rows])
    if mask.ndim != 1 or mask.shape != logprobs.shape or mask.shape != versions.shape:
        return None
    outside = ~mask
    if not np.isnan(logprobs[outside]).all() or (versions[outside] != -1).any() or (logprobs[mask] > 1e-4).any():
        return None
    if spans:
        before = np.concatenate(([0], np.cumsum(mask)))
        starts, stops = np.array(spans).T
        if (before[stops] - before[starts] != stops - starts).any():
            return None
    sampled = versions[mask]
    return (int(sampled.min()), int(sampled.max())) if sampled.size else (-1, -1)
