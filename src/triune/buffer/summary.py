"""What the store indexes of a group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from triune.buffer.door import Checked, check_experiences
from triune.errors import RecordError
from triune.records import Experience, Group, GroupId, Joined, Source, Text

_FIELDS = attrgetter("id.rollout", "is_valid", "reward", "source", "priority")
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


def summarise(group: Group) -> Summary:
    """Check a group and say what the store needs to know of it.

    Raises:
        RecordError: A record breaks its contract, belongs to another group, or a member is there in two attempts.
    """
    return summarise_all([group])[0][0]


def summarise_all(groups: Sequence[Group]) -> list[tuple[Summary, Joined | None]]:
    """Check groups, all or none: of each what the store needs to know, and its arrays for `encode_group`.

    Raises:
        RecordError: As `summarise`, of the first one found.
    """
    for group in groups:
        if not group.records:
            raise RecordError(str(group.id), "no records", "at least one", "refund the group instead")
    sampled = [group for group in groups if isinstance(group.records[0], Experience)]
    checked = iter(check_experiences([group.experiences for group in sampled]))
    return [
        _summarise_experiences(group, next(checked))
        if isinstance(group.records[0], Experience)
        else (_summarise_others(group), None)
        for group in groups
    ]


def _summarise_others(group: Group) -> Summary:
    """Of pairs and texts."""
    sources = [
        r.chosen.source if not isinstance(r, Text) and not isinstance(r, Experience) else Source.IMPORTED
        for r in group.records
    ]
    for record in group.records:
        for experience in () if isinstance(record, Text | Experience) else (record.chosen, record.rejected):
            experience.check()
    keys = ",".join(r.id if isinstance(r, Text) else str(n) for n, r in enumerate(group.records))
    return Summary(len(group), None, -1, -1, sources[0].value, Source.HUMAN in sources, False, 0.0, keys)


def _summarise_experiences(group: Group, checked: Checked) -> tuple[Summary, Joined | None]:
    rows = group.experiences
    attempts: dict[int, int] = {}
    rewards: dict[int, float] = {}
    is_waiting = is_urgent = False
    score = 0.0
    for rollout, is_valid, reward, source, priority in map(_FIELDS, rows):
        if rollout.group is not group.id and rollout.group != group.id:
            raise _is_of_another(rows, group.id)
        member = rollout.member
        if attempts.setdefault(member, rollout.attempt) != rollout.attempt:
            raise RecordError(f"{group.id}/{member}", "two attempts of one member", "at most one attempt is stored")
        if is_valid:
            if reward is None:
                is_waiting = True
            else:
                rewards[member] = reward
        is_urgent |= source is _HUMAN
        score += priority
    if not math.isfinite(score):
        for row in rows:
            row.check()
        raise RecordError(str(group.id), "priorities whose sum is not finite", "smaller numbers")
    keys = ",".join([f"{member}.{attempts[member]}" for member in sorted(attempts)])
    num, reward = len(rows), _mean(rewards)
    advantage = mean_advantage(rows, checked.joined)
    source = rows[0].source.value
    summary = Summary(
        num, reward, checked.oldest, checked.newest, source, is_urgent, is_waiting, score / num, keys, advantage
    )
    return summary, checked.joined


def _is_of_another(rows: Sequence[Experience], group: GroupId) -> RecordError:
    other = next(row.id for row in rows if row.id.rollout.group != group)
    return RecordError(str(other), f"a record in group {group}", "a record of that group")


def mean_advantage(rows: Sequence[Experience], joined: Joined | None = None) -> float | None:
    """Mean absolute advantage over the action tokens of all rows; None where a row has no advantages.

    `joined`: the arrays of these rows, where a check has put them together.
    """
    if joined is not None:
        mask, values = joined.columns["action_mask"], joined.columns.get("streams.advantages")
    else:
        streams = [row.streams["advantages"] for row in rows if "advantages" in row.streams]
        if not streams or len(streams) < len(rows) or any(stream.ndim != 1 for stream in streams):
            return None
        mask, values = np.concatenate([row.action_mask for row in rows]), np.concatenate(streams)
    if values is None or values.shape != mask.shape:
        return None
    num = np.count_nonzero(mask)
    total = float(np.abs(values).dot(mask)) if num else 0.0
    return total / num if num and math.isfinite(total) else None


def check_streams(rows: Sequence[Experience]) -> None:
    """Raise RecordError where a stream has not the length of its tokens; all else was checked before."""
    for row in rows:
        for stream in row.streams.values():
            if len(stream) != len(row.tokens):
                row.check()


def _mean(rewards: dict[int, float]) -> float | None:
    return math.fsum(rewards.values()) / len(rewards) if rewards else None
