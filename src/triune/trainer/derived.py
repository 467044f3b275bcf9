"""Streams that follow from what a record says beside its arrays: rewards of turns, and how a rollout ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from triune.algorithms import Algorithm
from triune.trainer.rows import Rows


def derived_streams(algorithm: Algorithm) -> tuple[str, ...]:
    """Names of the streams that `with_derived` makes for an algorithm."""
    found = {"truncated"} & algorithm.needs
    if getattr(algorithm.advantage, "takes_token_rewards", False):
        found |= {"token_rewards"}
    return tuple(sorted(found))


def with_derived(rows: Rows, names: Sequence[str]) -> Rows:
    """Add derived streams to a batch."""
    rows.streams.update({name: _MAKERS[name](rows) for name in names})
    return rows


def _token_rewards(rows: Rows) -> np.ndarray:
    """float32[total]: what was given at single tokens, so that a return is their sum and, at the end, the reward.

    A rollout's reward is its total. So a turn's reward is added at the turn's last token and taken away at the
    sequence's last trained one: it only comes earlier. A stored stream `token_rewards` is added as it is.
    """
    found = np.zeros(len(rows.tokens), dtype=np.float64)
    for row, start, end in zip(rows.experiences, rows.offsets, rows.ends, strict=False):
        if not end:
            continue
        mine = found[start : start + len(row)]
        if "token_rewards" in row.streams:
            mine += row.streams["token_rewards"]
        for turn in row.turns:
            if turn.reward and turn.stop > turn.start:
                mine[min(turn.stop, end) - 1] += turn.reward
                mine[end - 1] -= turn.reward
    return found.astype(np.float32)


def _truncated(rows: Rows) -> np.ndarray:
    """float32[total]: 1 in sequences that ended before the policy chose to."""
    was_cut = np.array([row.stop.is_truncated for row in rows.experiences], dtype=np.float32)
    return np.repeat(was_cut, np.diff(rows.offsets))


_MAKERS: dict[str, Callable[[Rows], np.ndarray]] = {"token_rewards": _token_rewards, "truncated": _truncated}

DERIVED = frozenset(_MAKERS)
"""Streams that are never asked of the experience."""
