"""A batch as columns: one flat array per stream over all sequences, no copy per row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from triune.errors import TrainingError
from triune.ports import Lease
from triune.records import Experience, ExperienceId, GroupId, Pair, Record, RolloutId, Source, Text

_SOURCES = {source: number for number, source in enumerate(Source)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """All valid sequences of a batch. Flat arrays hold them end to end; sequence n is `[offsets[n], offsets[n + 1])`.

    Attributes:
        experiences: The sequences, in the order of the leases.
        offsets: int64[N + 1].
        tokens: int32[total].
        action_mask: bool[total], False on a sequence's first token: nothing predicts it.
        streams: float32[total, …] by name, `behaviour_logprobs` among them (NaN where unknown).
        temperature: float32[N], or float32[total] when a sequence was sampled at several temperatures.
        rollouts: int64[N], number of each sequence's rollout in the batch.
        num_rollouts: How many there are.
        rewards: float32[N], NaN where unknown.
        sources: int64[N], position in `Source`.
        num_invalid: Sequences that were left out because their rollout or verifier failed, or as halves of a pair of
            which one half has nothing to train on.
        weights: float32[N / 2], weight of each pair when the batch is of pairs, else None. Sequences 2p and 2p + 1 are
            the chosen and the rejected half of pair p.
        margins: float32[N / 2], likewise.
    """

    experiences: list[Experience]
    offsets: np.ndarray
    tokens: np.ndarray
    action_mask: np.ndarray
    streams: dict[str, np.ndarray]
    temperature: np.ndarray
    rollouts: np.ndarray
    num_rollouts: int
    rewards: np.ndarray
    sources: np.ndarray
    num_invalid: int
    weights: np.ndarray | None = None
    margins: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.experiences)

    @cached_property
    def ends(self) -> np.ndarray:
        """int64[N]: one past each sequence's last trained token; 0 when it has none. What follows is not computed."""
        ends = np.zeros(len(self), dtype=np.int64)
        rows, places = self._trained
        ends[rows] = places + 1  # ascending, so the last write of a row is its last token
        return ends

    @cached_property
    def firsts(self) -> np.ndarray:
        """int64[N]: each sequence's first trained token; 0 when it has none."""
        firsts = np.zeros(len(self), dtype=np.int64)
        rows, places = self._trained
        firsts[rows[::-1]] = places[::-1]
        return firsts

    @cached_property
    def _trained(self) -> tuple[np.ndarray, np.ndarray]:
        """Row and place of every trained token, ascending."""
        flat = np.flatnonzero(self.action_mask)
        rows = np.searchsorted(self.offsets, flat, side="right") - 1
        return rows, flat - self.offsets[rows]

    @property
    def unit_size(self) -> int:
        """How many sequences in a row must stay together in one micro-batch: 2 in a batch of pairs, else 1."""
        return 1 if self.weights is None else 2

    @cached_property
    def bundles(self) -> np.ndarray:
        """int64[N]: sequences with one number must stay together in one mini-batch: those of a rollout, or a pair."""
        return self.rollouts if self.weights is None else np.arange(len(self)) // 2

    @property
    def num_actions(self) -> int:
        """Tokens to train on."""
        return int(np.count_nonzero(self.action_mask))


def build_rows(leases: Sequence[Lease], streams: Sequence[str] = ()) -> Rows:
    """Gather the valid sequences of a batch into columns: experiences, both halves of pairs, texts.

    Args:
        leases: What the step consumes.
        streams: Names of stored streams that the algorithm needs.

    Raises:
        TrainingError: The batch mixes pairs with other records, a stream is missing or a temperature is 0.
    """
    records = [(lease, number, record) for lease in leases for number, record in enumerate(lease.group.records)]
    pairs = [record for _, _, record in records if isinstance(record, Pair)]
    if pairs and len(pairs) < len(records):
        odd = next(lease for lease, _, record in records if not isinstance(record, Pair))
        raise TrainingError(odd.entry, "holds no pair, unlike others of its batch", "a buffer of one kind of record")
    every = [row for lease, number, record in records for row in _sequences(record, lease.group.id, number)]
    kept = [row for row in every if row.is_valid]
    if pairs:
        pairs = [pair for pair in pairs if _is_trainable(pair.chosen) and _is_trainable(pair.rejected)]
        kept = [half for pair in pairs for half in (pair.chosen, pair.rejected)]
    rollouts: list[int] = []
    numbers: dict[Any, int] = {}
    for row in kept:
        rollouts.append(numbers.setdefault(row.id.rollout, len(numbers)))
    lengths = np.fromiter((len(row.tokens) for row in kept), dtype=np.int64, count=len(kept))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    action_mask = _flat([row.action_mask for row in kept], np.bool_)
    action_mask[offsets[:-1][lengths > 0]] = False
    return Rows(
        experiences=kept,
        offsets=offsets,
        tokens=_flat([row.tokens for row in kept], np.int32),
        action_mask=action_mask,
        streams={
            "behaviour_logprobs": _flat([row.behaviour_logprobs for row in kept], np.float32),
            **{name: _flat([_stored(row, name) for row in kept], np.float32) for name in streams},
        },
        temperature=_temperatures(kept),
        rollouts=np.array(rollouts, dtype=np.int64),
        num_rollouts=len(numbers),
        rewards=np.array([np.nan if row.reward is None else row.reward for row in kept], dtype=np.float32),
        sources=np.array([_SOURCES[row.source] for row in kept], dtype=np.int64),
        num_invalid=len(every) - len(kept),
        weights=np.array([pair.weight for pair in pairs], dtype=np.float32) if pairs else None,
        margins=np.array([pair.margin for pair in pairs], dtype=np.float32) if pairs else None,
    )


def _sequences(record: Record, group: GroupId, number: int) -> Iterator[Experience]:
    if isinstance(record, Pair):
        yield from (record.chosen, record.rejected)
    elif isinstance(record, Text):
        yield _experience_of(record, group, number)
    else:
        yield record


def _is_trainable(half: Experience) -> bool:
    return half.is_valid and bool(half.action_mask[1:].any())


def _experience_of(text: Text, group: GroupId, number: int) -> Experience:
    """A text as a sequence of which every token but the first is trained."""
    length = len(text.tokens)
    return Experience(
        id=ExperienceId(RolloutId(group, number)),
        tokens=np.asarray(text.tokens, dtype=np.int32),
        action_mask=np.ones(length, dtype=np.bool_),
        logprobs=np.full(length, np.nan, dtype=np.float32),
        versions=np.full(length, -1, dtype=np.int32),
        source=Source.IMPORTED,
    )


def describe(leases: Sequence[Lease]) -> str:
    """One sequence of a batch that cannot be trained on, in words."""
    for lease in leases:
        for number, record in enumerate(lease.group.records):
            for row in _sequences(record, lease.group.id, number):
                said = str(row.messages[-1].get("content", ""))[-200:] if row.messages else "(no messages)"
                return (
                    f"rollout {row.id.rollout} stopped with {row.stop.value!r}, is_valid={row.is_valid}, "
                    f"reward={row.reward}, {len(row)} tokens of which {row.num_actions} sampled; it ended {said!r}"
                )
    return "the batch holds no rollout at all"


def _flat(parts: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)


def _stored(row: Experience, name: str) -> np.ndarray:
    found = row.streams.get(name)
    if found is None:
        do = "add an advantage operator to `pipeline`" if name == "advantages" else ""
        raise TrainingError(str(row.id), f"has no stream {name!r}", "what the algorithm needs", do)
    return found


def _temperatures(rows: list[Experience]) -> np.ndarray:
    values = [row.temperature for row in rows]
    if any(isinstance(value, np.ndarray) for value in values):
        flat = _flat(
            [np.broadcast_to(np.float32(value), (len(row),)) for value, row in zip(values, rows, strict=True)],  # type: ignore[arg-type]
            np.float32,
        )
    else:
        flat = np.array(values, dtype=np.float32)
    if flat.size and not (flat > 0).all():
        raise TrainingError("batch", f"a temperature of {flat.min():g}", "above 0", "train on sampled answers only")
    return flat
