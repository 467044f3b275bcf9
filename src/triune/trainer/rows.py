"""A batch as columns: one flat array per stream over all sequences, no copy per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from triune.errors import TrainingError
from triune.ports import Lease
from triune.records import Experience, Source

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
        num_invalid: Sequences that were left out because their rollout or verifier failed.
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
    def num_actions(self) -> int:
        """Tokens to train on."""
        return int(np.count_nonzero(self.action_mask))


def build_rows(leases: Sequence[Lease], streams: Sequence[str] = ()) -> Rows:
    """Gather the valid experiences of a batch into columns.

    Args:
        leases: What the step consumes.
        streams: Names of stored streams that the algorithm needs.

    Raises:
        TrainingError: An entry holds something else than experiences, a stream is missing or a temperature is 0.
    """
    every: list[Experience] = []
    rollouts: list[int] = []
    numbers: dict[Any, int] = {}
    for lease in leases:
        for record in lease.group.records:
            if not isinstance(record, Experience):
                raise TrainingError(lease.entry, f"holds a {type(record).__name__}", "experiences")
            every.append(record)
    kept = [row for row in every if row.is_valid]
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
    )


def describe(leases: Sequence[Lease]) -> str:
    """One rollout of a batch that cannot be trained on, in words."""
    for lease in leases:
        for row in lease.group.records:
            if isinstance(row, Experience):
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
