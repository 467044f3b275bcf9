"""How the rows of an update are laid out for the model: length-sorted micro-batches, padded on the right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from triune.algorithms import MicroBatch
from triune.trainer.rows import Rows


@dataclass(frozen=True, kw_only=True, eq=False)
class Micro:
    """One micro-batch: what the algorithm sees, and what the model needs to fill in its log-probs.

    Attributes:
        batch: Streams [B, T] for the algorithm's terms.
        inputs: int64[B, T - 1], what the model reads; a trained token at t is predicted at t - 1.
        chosen: int64[M], flat positions b * T + t of trained tokens.
        before: int64[M], flat positions b * (T - 1) + t - 1 whose hidden states predict them.
        temperature: float32[M], or None when all are 1.
        num_tokens: Real tokens the model reads.
    """

    batch: MicroBatch
    inputs: Tensor
    chosen: Tensor
    before: Tensor
    temperature: Tensor | None
    num_tokens: int

    def with_streams(self, **streams: Tensor) -> Micro:
        """Copy with further streams [B, T, …]."""
        return replace(self, batch=replace(self.batch, streams={**self.batch.streams, **streams}))


def plan_micro_batches(lengths: np.ndarray, budget: int) -> list[np.ndarray]:
    """Cut rows into micro-batches of at most `budget` tokens, padding included.

    Rows are sorted by length, longest first, so that a micro-batch is hardly padded; the longest come first so that a
    lack of memory shows at once. A row longer than the budget gets a micro-batch of its own: nothing is ever cut.

    Returns:
        Row numbers of each micro-batch.
    """
    order = np.argsort(-lengths, kind="stable")
    cuts: list[np.ndarray] = []
    start = 0
    while start < len(order):
        width = max(int(lengths[order[start]]), 1)
        stop = start + max(1, budget // width)
        cuts.append(order[start:stop])
        start = stop
    return cuts


def plan_mini_batches(rows: Rows, num: int, seed: Sequence[int]) -> list[np.ndarray]:
    """Deal whole rollouts out to `num` mini-batches of nearly equal size, shuffled by `seed`.

    Rows without a token to train on are left out: they cost time and change nothing.

    Returns:
        Row numbers of each mini-batch; fewer than `num` when there are fewer rollouts.
    """
    trained = rows.ends > 0
    if num == 1:
        return [np.flatnonzero(trained)] if trained.any() else []
    live = np.unique(rows.rollouts[trained])
    shuffled = np.random.default_rng(seed).permutation(live)
    parts = [part for part in np.array_split(shuffled, num) if part.size]
    return [np.flatnonzero(trained & np.isin(rows.rollouts, part)) for part in parts]


def pad_rows(rows: Rows, numbers: np.ndarray, device: torch.device | str = "cpu") -> Micro:
    """Lay rows out as [B, T], padded on the right, without an attention mask.

    In a causal model no token sees what comes after it, so padding needs no mask, whatever id it has.
    """
    ends = rows.ends[numbers]
    width = max(int(ends.max()), 2)
    places = np.arange(width)
    inside = places < ends[:, None]
    index = np.where(inside, rows.offsets[numbers][:, None] + places, 0)
    mask = rows.action_mask[index] & inside
    row, column = np.nonzero(mask)

    def padded(flat: np.ndarray) -> Tensor:
        return torch.from_numpy(flat[index]).to(device)

    tokens = torch.from_numpy(np.where(inside, rows.tokens[index], 0).astype(np.int64)).to(device)
    return Micro(
        batch=MicroBatch(
            tokens=tokens,
            action_mask=torch.from_numpy(mask).to(device),
            streams={name: padded(flat) for name, flat in rows.streams.items()},
            **_per_sequence(rows, numbers, device),
        ),
        inputs=tokens[:, :-1],
        chosen=torch.from_numpy(row * width + column).to(device),
        before=torch.from_numpy(row * (width - 1) + column - 1).to(device),
        temperature=_temperature(rows, index[row, column], numbers[row], device),
        num_tokens=int(ends.sum()) - len(numbers),
    )


def _per_sequence(rows: Rows, numbers: np.ndarray, device: torch.device | str) -> dict[str, Tensor]:
    firsts = rows.temperature if len(rows.temperature) == len(rows) else rows.temperature[rows.offsets[:-1]]
    columns = {
        "rollouts": rows.rollouts[numbers],
        "rewards": rows.rewards[numbers],
        "sources": rows.sources[numbers],
        "temperature": firsts[numbers],
    }
    return {name: torch.from_numpy(column).to(device) for name, column in columns.items()}


def _temperature(rows: Rows, flat: np.ndarray, owners: np.ndarray, device: torch.device | str) -> Tensor | None:
    per_token = rows.temperature[owners] if len(rows.temperature) == len(rows) else rows.temperature[flat]
    if (per_token == 1.0).all():
        return None
    return torch.from_numpy(per_token).to(device)
