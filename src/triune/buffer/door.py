"""The check at the store's door: `Experience.check` of many experiences at once, in one pass over their joined arrays.

What it joins, and the versions it met on the way, are what the store needs next, so they are handed on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from triune.records import Experience, Joined

PART_TOKENS = 16384
"""Groups are checked together up to so many tokens, which still fit a processor's cache."""

_INT32, _FLOAT32, _BOOL = np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.bool_)
_MAIN = {"tokens": _INT32, "action_mask": _BOOL, "logprobs": _FLOAT32, "versions": _INT32}
_FIELDS = attrgetter(*_MAIN, "streams", "turns", "temperature", "raw_logprobs", "reward", "unknown")
_SHAPE = attrgetter("shape")

Spans = Sequence[tuple[int, int]]


class Checked(NamedTuple):
    """What is known of the experiences of one group, which are sound.

    Attributes:
        oldest: Smallest version of their action tokens; -1 = an action token that no policy sampled, or none at all.
        newest: Largest, likewise.
        joined: Their arrays, where all have the same ones and there is nothing unusual; else None.
    """

    oldest: int
    newest: int
    joined: Joined | None


def check_experiences(groups: Sequence[Sequence[Experience]]) -> list[Checked]:
    """Check the experiences of groups.

    Raises:
        RecordError: One breaks its contract; names it.
    """
    found: list[Checked] = []
    for part in _parts(groups):
        found += _check_together(part) or [_check_alone(rows) for rows in part]
    return found


def _parts(groups: Sequence[Sequence[Experience]]) -> Iterator[list[Sequence[Experience]]]:
    part, size = [], 0
    for rows in groups:
        tokens = sum([len(row.tokens) for row in rows])
        if part and size + tokens > PART_TOKENS:
            yield part
            part, size = [], 0
        part.append(rows)
        size += tokens
    if part:
        yield part


def _check_alone(rows: Sequence[Experience]) -> Checked:
    checked = _check_together([rows])
    if checked is not None:
        return checked[0]
    for row in rows:  # something may be wrong, and the precise check has to say what
        row.check()
    versions = [version for row in rows for version in row.versions[row.action_mask].tolist()]
    return Checked(min(versions, default=-1), max(versions, default=-1), None)


def _check_together(groups: Sequence[Sequence[Experience]]) -> list[Checked] | None:
    """None when an experience is not plainly right, or not like the others."""
    rows = groups[0] if len(groups) == 1 else [row for rows in groups for row in rows]
    *main, streams, turns, temperatures, raws, rewards, unknowns = zip(*map(_FIELDS, rows), strict=True)
    if set(map(type, raws)) != {type(None)} or set(map(type, temperatures)) != {float}:
        return None
    if any(unknowns) or not all(map(math.isfinite, [reward for reward in rewards if reward is not None])):
        return None
    columns = _join(main, streams)
    if columns is None:
        return None
    mask, logprob, version = columns["action_mask"], columns["logprobs"], columns["versions"]
    unsampled = version == -1
    if np.count_nonzero((np.isnan(logprob) & unsampled) | mask) < mask.size or np.count_nonzero(logprob > 1e-4):
        return None
    lengths = list(map(len, main[0]))
    if not _are_turns_right(turns, lengths, mask):
        return None
    return list(_split(groups, lengths, columns, unsampled))


def _join(main: Sequence[Sequence[Any]], streams: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray] | None:
    """The arrays of all, by name; None when one has another shape, dtype or name than it should."""
    names, first = streams[0].keys(), streams[0]
    if any(each.keys() != names for each in streams):
        return None
    others = [[each[name] for each in streams] for name in names]
    if set(map(type, chain(*main, *others))) != {np.ndarray}:
        return None
    shapes = list(map(_SHAPE, main[0]))
    joined: dict[str, np.ndarray] = {}
    try:  # numpy refuses arrays of another dtype or number of axes
        for (name, dtype), arrays in zip(_MAIN.items(), main, strict=True):
            joined[name] = np.concatenate(arrays, dtype=dtype, casting="no")
            if list(map(_SHAPE, arrays)) != shapes or joined[name].ndim != 1:
                return None
        for name, arrays in zip(names, others, strict=True):
            joined[f"streams.{name}"] = np.concatenate(arrays, dtype=first[name].dtype, casting="no")
            if list(map(len, arrays)) != [shape[0] for shape in shapes]:
                return None
    except (TypeError, ValueError):
        return None
    return joined


def _are_turns_right(turns: Sequence[Any], lengths: Sequence[int], mask: np.ndarray) -> bool:
    """Whether every turn is a span of action tokens."""
    flags, offset = mask.tobytes(), 0
    for each, length in zip(turns, lengths, strict=True):
        for turn in each:
            if not 0 <= turn.start <= turn.stop <= length:
                return False
            if flags.find(b"\0", offset + turn.start, offset + turn.stop) >= 0:
                return False
        offset += length
    return True


def _split(
    groups: Sequence[Sequence[Experience]], lengths: list[int], columns: dict[str, np.ndarray], unsampled: np.ndarray
) -> Iterator[Checked]:
    """What was joined, for each group its own."""
    mask, version = columns["action_mask"], columns["versions"]
    if len(groups) == 1:
        yield Checked(*_bounds(version, mask, unsampled), Joined(lengths, columns))
        return
    row = start = 0
    for rows in groups:
        own = lengths[row : row + len(rows)]
        stop = start + sum(own)
        part = {name: column[start:stop] for name, column in columns.items()}
        bounds = _bounds(part["versions"], part["action_mask"], unsampled[start:stop])
        yield Checked(*bounds, Joined(own, part))
        row, start = row + len(rows), stop


def _bounds(version: np.ndarray, mask: np.ndarray, unsampled: np.ndarray) -> tuple[int, int]:
    """Smallest and largest version of action tokens, given that all others have -1."""
    if not version.size:
        return -1, -1
    if np.count_nonzero(unsampled) + np.count_nonzero(mask) > version.size:  # an action token has -1 too
        return -1, int(version[mask].max())
    oldest = int(np.minimum.reduce(version.view(np.uint32)))  # -1 is the largest there
    return (oldest, int(np.maximum.reduce(version))) if oldest < 1 << 31 else (-1, -1)
