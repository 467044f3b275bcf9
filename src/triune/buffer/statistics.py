"""What is in a store, in numbers: depth, age, staleness, and how rewards are spread, per source."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from triune.buffer.query_columns import STALENESS
from triune.buffer.store import Store

NUM_BINS = 10
"""Of a histogram."""

_MOMENTS = ("min", "median", "p90", "max")


class Depth(msgspec.Struct, frozen=True, kw_only=True):
    """How many entries of a buffer are in a state."""

    buffer: str
    state: str
    num_entries: int
    num_records: int


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """Rewards of a source's entries, each the mean over its rollouts.

    Attributes:
        edges: One more than `counts`; the last bin holds its upper edge too.
        mean: Over all of them; None = there are none.
        num_unknown: Entries without a known reward.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    mean: float | None
    num_unknown: int


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """A store in numbers.

    Attributes:
        totals: The counts of `Buffer.stats`.
        depth: By buffer and state.
        age_s: Of ready entries: min, median, p90, max, in seconds; empty when there are none.
        staleness: Published steps since the oldest version → ready entries.
        rewards: By source.
    """

    totals: Mapping[str, float]
    depth: tuple[Depth, ...]
    age_s: Mapping[str, float]
    staleness: Mapping[int, int]
    rewards: Mapping[str, Histogram]


def statistics(store: Store, run: str | None = None) -> Statistics:
    """Count what there is; `run` narrows uses and admissions to one run. Call it inside a transaction."""
    db = store.db
    depth = db.all(
        "SELECT buffer, state, count(*), sum(num_records) FROM entries GROUP BY buffer, state ORDER BY buffer, state"
    )
    ages = db.all("SELECT created, count(*) FROM entries WHERE state = 'ready' GROUP BY created ORDER BY created DESC")
    stale = db.all(f"SELECT {STALENESS} FROM entries e WHERE e.state = 'ready'")
    counts: dict[int, int] = {}
    for (value,) in stale:
        counts[value] = counts.get(value, 0) + 1
    return Statistics(
        totals=store.entries.stats(run),
        depth=tuple(
            Depth(buffer=buffer, state=state, num_entries=number, num_records=int(records))
            for buffer, state, number, records in depth
        ),
        age_s=_quantiles([(max(0.0, db.now - created), number) for created, number in ages]),
        staleness=dict(sorted(counts.items())),
        rewards=_histograms(
            db.all("SELECT source, reward, count(*) FROM entries GROUP BY source, reward ORDER BY source, reward")
        ),
    )


def _quantiles(values: Sequence[tuple[float, int]]) -> dict[str, float]:
    """Of (value, how often) in rising order: the smallest value that a share of them does not exceed."""
    total = sum(number for _, number in values)
    if not total:
        return {}
    found, passed = [], 0
    wanted = [1, math.ceil(total * 0.5), math.ceil(total * 0.9), total]
    for value, number in values:
        passed += number
        while len(found) < len(wanted) and passed >= wanted[len(found)]:
            found.append(value)
    return dict(zip(_MOMENTS, found, strict=True))


def _histograms(rows: Sequence[Sequence[object]]) -> dict[str, Histogram]:
    by_source: dict[str, list[tuple[float | None, int]]] = {}
    for source, reward, number in rows:
        by_source.setdefault(str(source), []).append((reward, number))  # type: ignore[arg-type]
    return {source: _histogram(values) for source, values in sorted(by_source.items())}


def _histogram(values: Sequence[tuple[float | None, int]]) -> Histogram:
    known = [(reward, number) for reward, number in values if reward is not None]
    unknown = sum(number for reward, number in values if reward is None)
    if not known:
        return Histogram(edges=(), counts=(), mean=None, num_unknown=unknown)
    low, high = min(reward for reward, _ in known), max(reward for reward, _ in known)
    num_bins = NUM_BINS if high > low else 1
    width = (high - low) / num_bins
    counts = [0] * num_bins
    for reward, number in known:
        counts[min(int((reward - low) / width), num_bins - 1) if width else 0] += number
    total = sum(counts)
    mean = math.fsum(reward * number for reward, number in known) / total
    edges = (*(low + width * number for number in range(num_bins)), high)
    return Histogram(edges=edges, counts=tuple(counts), mean=mean, num_unknown=unknown)
