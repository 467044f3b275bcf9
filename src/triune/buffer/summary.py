"""What the store indexes of a group, and the check at its door."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from triune.errors import RecordError
from triune.records import Experience, Group, Source, Text

INT32, FLOAT32, BOOL = np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.bool_)

_ARRAYS = attrgetter("tokens", "action_mask", "logprobs", "versions")
_ZERO = np.zeros(1, np.int64)
_HUMAN = Source.HUMAN  # an enum's member is looked up slowly


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
        advantage: Mean absolute advantage over action tokens; None where a record has none.
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
    advantage: float | None = None


def summarise(group: Group, joined: dict[str, np.ndarray] | None = None) -> Summary:
    """Check a group and say what the store needs to know of it.

    Args:
        group: What is put.
        joined: Takes the arrays of all experiences that were joined on the way, by name, for `encode_group`.

    Raises:
        RecordError: A record breaks its contract, belongs to another group, or a member is there in two attempts.
    """
    if not group.records:
        raise RecordError(str(group.id), "no records", "at least one", "refund the group instead")
    if isinstance(group.records[0], Experience):
        return _summarise_experiences(group, {} if joined is None else joined)
    sources = [
        r.chosen.source if not isinstance(r, Text) and not isinstance(r, Experience) else Source.IMPORTED
        for r in group.records
    ]
    for record in group.records:
        for experience in () if isinstance(record, Text | Experience) else (record.chosen, record.rejected):
            experience.check()
    keys = ",".join(r.id if isinstance(r, Text) else str(n) for n, r in enumerate(group.records))
    return Summary(len(group), None, -1, -1, sources[0].value, Source.HUMAN in sources, False, 0.0, keys)


def _summarise_experiences(group: Group, joined: dict[str, np.ndarray]) -> Summary:
    rows = group.experiences
    oldest, newest = _check(rows, joined)
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
        is_urgent |= row.source is _HUMAN
        score += row.priority
    if not math.isfinite(score):
        for row in rows:
            row.check()
        raise RecordError(str(group.id), "priorities whose sum is not finite", "smaller numbers")
    reward = _mean(rewards)
    keys = ",".join(f"{member}.{attempts[member]}" for member in sorted(attempts))
    num = len(rows)
    source, advantage = rows[0].source.value, mean_advantage(rows, joined)
    return Summary(num, reward, oldest, newest, source, is_urgent, is_waiting, score / num, keys, advantage)


def mean_advantage(rows: Sequence[Experience], joined: dict[str, np.ndarray] | None = None) -> float | None:
    """Mean absolute advantage over the action tokens of all rows; None where a row has no advantages.

    `joined` is what `summarise` takes.
    """
    joined = {} if joined is None else joined
    streams = [row.streams["advantages"] for row in rows if "advantages" in row.streams]
    if not streams or len(streams) < len(rows) or any(stream.ndim != 1 for stream in streams):
        return None
    mask = joined.get("action_mask")
    mask = np.concatenate([row.action_mask for row in rows]) if mask is None else mask
    values = joined["streams.advantages"] = np.concatenate(streams)
    if values.shape != mask.shape:
        return None
    num = np.count_nonzero(mask)
    total = float(np.abs(values).dot(mask)) if num else 0.0
    return total / num if num and math.isfinite(total) else None


def _check(rows: Sequence[Experience], joined: dict[str, np.ndarray]) -> tuple[int, int]:
    """`Experience.check` of all rows in one pass over their joined arrays; (oldest, newest) version."""
    bounds = _check_quickly(rows, joined)
    if bounds is None:
        for row in rows:
            row.check()
        versions = [version for row in rows for version in row.versions[row.action_mask].tolist()]
        bounds = (min(versions), max(versions)) if versions else (-1, -1)
    return bounds


def _check_quickly(rows: Sequence[Experience], joined: dict[str, np.ndarray]) -> tuple[int, int] | None:
    """(oldest, newest) version, or None when something may be wrong and the precise check has to say what."""
    tokens, masks, logprobs, versions = zip(*map(_ARRAYS, rows), strict=True)
    lengths = list(map(len, tokens))
    if not lengths == list(map(len, masks)) == list(map(len, logprobs)) == list(map(len, versions)):
        return None
    spans, offset = [], 0
    for row, length in zip(rows, lengths, strict=True):
        if not _has_right_rest(row, length):
            return None
        for turn in row.turns:
            if not 0 <= turn.start <= turn.stop <= length:
                return None
            spans += (offset + turn.start, offset + turn.stop)
        offset += length
    mask, logprob, version = np.concatenate(masks), np.concatenate(logprobs), np.concatenate(versions)
    dtypes = (tokens[0].dtype, mask.dtype, logprob.dtype, version.dtype)
    if dtypes != (INT32, BOOL, FLOAT32, INT32) or not mask.shape == logprob.shape == version.shape == (offset,):
        return None
    unsampled = version == -1
    if not ((np.isnan(logprob) | mask).all() and (unsampled | mask).all()) or (logprob > 1e-4).any():
        return None
    if spans:
        before = np.concatenate((_ZERO, mask.cumsum()))
        inside = before[spans]
        if (inside[1::2] - inside[::2]).tolist() != [b - a for a, b in pairwise(spans)][::2]:
            return None
    joined |= {"action_mask": mask, "logprobs": logprob, "versions": version}
    return _bounds(version, mask, unsampled)


def _bounds(version: np.ndarray, mask: np.ndarray, unsampled: np.ndarray) -> tuple[int, int]:
    """Smallest and largest version of action tokens, given that all others have -1."""
    if not version.size:
        return -1, -1
    if np.count_nonzero(unsampled) + np.count_nonzero(mask) > version.size:  # an action token has -1 too
        return -1, int(version[mask].max())
    oldest = int(version.view(np.uint32).min())  # -1 is the largest there
    return (oldest, int(version.max())) if oldest < 1 << 31 else (-1, -1)


def _has_right_rest(row: Experience, length: int) -> bool:
    """Whether everything but the four main arrays is plainly right."""
    if row.raw_logprobs is not None or type(row.temperature) is not float:
        return False
    if row.reward is not None and not math.isfinite(row.reward):
        return False
    return not row.streams or all(len(stream) == length for stream in row.streams.values())


def check_streams(rows: Sequence[Experience]) -> None:
    """Raise RecordError where a stream has not the length of its tokens; all else was checked before."""
    for row in rows:
        for stream in row.streams.values():
            if len(stream) != len(row.tokens):
                row.check()


def _mean(rewards: dict[int, float]) -> float | None:
    return math.fsum(rewards.values()) / len(rewards) if rewards else None
