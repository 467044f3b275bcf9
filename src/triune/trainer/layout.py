"""How the rows of an update are laid out: for the algorithm as padded rows, for the model in the cheapest exact way.

The model reads either length-sorted rows padded on the right, or *trees*: what several answers have in common (their
prompt) once, then every answer's own tokens, with an attention mask that hides answers from each other. A group of
eight short answers to one prompt costs a fraction of eight rows, and gives the same log-probs and gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from triune.algorithms import MicroBatch
from triune.trainer.rows import Rows

MAX_TREE = 512
"""Columns of the widest tree: its attention mask is dense, so longer ones would cost more than they share."""

MIN_SAVED = 0.1
"""Share of tokens that trees must save to be used."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Micro:
    """One micro-batch: what the algorithm sees, and what the model needs to fill in its log-probs.

    Attributes:
        batch: Streams [B, T] for the algorithm's terms, one row per sequence.
        inputs: int64[R, W], what the model reads.
        positions: int64[R, W] in trees; None = 0, 1, 2, … in every row.
        inside: bool[R, W], False on padding.
        allowed: bool[R, W, W] in trees, whether query (second axis) may see key (third); None = causal.
        chosen: int64[M], flat positions b * T + t of trained tokens.
        before: int64[M], flat positions in `inputs` whose hidden states predict them.
        temperature: float32[M], or None when all are 1.
        num_tokens: Tokens of all sequences that a padded layout would read, padding left out.
    """

    batch: MicroBatch
    inputs: Tensor
    positions: Tensor | None
    inside: Tensor
    allowed: Tensor | None
    chosen: Tensor
    before: Tensor
    temperature: Tensor | None
    num_tokens: int

    def with_streams(self, **streams: Tensor) -> Micro:
        """Copy with further streams [B, T, …]."""
        return replace(self, batch=replace(self.batch, streams={**self.batch.streams, **streams}))


# ------------------------------------------------------------------------------------------------ planning


def plan_micro_batches(lengths: np.ndarray, budget: int) -> list[np.ndarray]:
    """Cut rows into micro-batches of at most `budget` tokens, padding included.

    Rows are sorted by length, longest first, so that a micro-batch is hardly padded; the longest come first so that a
    lack of memory shows at once. A row longer than the budget gets a micro-batch of its own: nothing is ever cut.
    There are as few micro-batches as the budget allows, of nearly equal size: the largest one decides about memory.

    Returns:
        Row numbers of each micro-batch.
    """
    order = np.argsort(-lengths, kind="stable")
    widths = np.maximum(lengths[order], 1).tolist()
    starts = _cut(widths, budget)
    low, high = min(budget, sum(widths) // max(len(starts), 1)), budget
    while low < high:  # the smallest budget with no more micro-batches
        middle = (low + high) // 2
        low, high = (middle + 1, high) if len(_cut(widths, middle)) > len(starts) else (low, middle)
    return np.split(order, _cut(widths, high)[1:]) if widths else []


def _cut(widths: Sequence[int], budget: int) -> list[int]:
    """Where each micro-batch starts, for rows sorted by width."""
    starts, start = [], 0
    while start < len(widths):
        starts.append(start)
        start += max(1, budget // widths[start])
    return starts


def plan_mini_batches(rows: Rows, num: int, seed: Sequence[int]) -> list[np.ndarray]:
    """Deal whole rollouts, or pairs, out to `num` mini-batches of nearly equal size, shuffled by `seed`.

    Rows without a token to train on are left out: they cost time and change nothing.

    Returns:
        Row numbers of each mini-batch, ascending; fewer than `num` when there are fewer rollouts.
    """
    trained = rows.ends > 0
    if num == 1:
        return [np.flatnonzero(trained)] if trained.any() else []
    live = np.unique(rows.bundles[trained])
    shuffled = np.random.default_rng(seed).permutation(live)
    parts = [part for part in np.array_split(shuffled, num) if part.size]
    return [np.flatnonzero(trained & np.isin(rows.bundles, part)) for part in parts]


def plan_trees(rows: Rows, numbers: np.ndarray, widest: int) -> list[np.ndarray] | None:
    """Gather rows that begin with the same tokens up to their first trained one; both halves of a pair in one tree.

    Returns:
        Row numbers of each tree, or None when that would save less than `MIN_SAVED`, a row or pair is too long, or the
        halves of a pair begin differently.
    """
    lengths = rows.ends[numbers] - 1
    if not len(numbers) or lengths.max() > widest:
        return None
    tokens, starts, firsts = rows.tokens, rows.offsets[numbers].tolist(), rows.firsts[numbers].tolist()
    found: dict[bytes, list[range]] = {}
    for place in range(0, len(starts), rows.unit_size):
        unit = range(place, place + rows.unit_size)
        beginnings = {tokens[starts[each] : starts[each] + firsts[each]].tobytes() for each in unit}
        if len(beginnings) > 1:
            return None
        found.setdefault(beginnings.pop(), []).append(unit)
    trees: list[list[int]] = []
    total = 0
    for units in found.values():
        prefix, width = firsts[units[0][0]], 0
        for unit in units:
            suffix = sum(int(lengths[place]) - prefix for place in unit)
            if prefix + suffix > widest:
                return None
            if width == 0 or width + suffix > widest:
                trees.append([])
                total += prefix
                width = prefix
            trees[-1] += unit
            width += suffix
            total += suffix
    if total > (1 - MIN_SAVED) * int(lengths.sum()):
        return None
    return [numbers[places] for places in trees]


# ---------------------------------------------------------------------------------------------- laying out


def lay_out(
    rows: Rows, numbers: np.ndarray, budget: int, *, device: torch.device | str = "cpu", widest: int = MAX_TREE
) -> list[Micro]:
    """Lay the rows of one update out as micro-batches.

    Args:
        rows: The batch.
        numbers: The update's rows.
        budget: Tokens of a micro-batch, padding included.
        device: Where tensors go.
        widest: Columns of the widest tree; 0 = no trees.
    """
    trees = plan_trees(rows, numbers, widest)
    if trees is None:
        return [pad_rows(rows, part, device) for part in plan_rows(rows, numbers, budget)]
    widths = np.array([tree_width(rows, tree) for tree in trees])
    return [grow_trees(rows, [trees[n] for n in part], device) for part in plan_micro_batches(widths, budget)]


def plan_rows(rows: Rows, numbers: np.ndarray, budget: int) -> list[np.ndarray]:
    """Row numbers of each micro-batch of padded rows; the halves of a pair are planned as one, twice as wide."""
    units = numbers.reshape(-1, rows.unit_size)
    widest = rows.ends[units].max(1) - 1
    return [units[part].ravel() for part in plan_micro_batches(widest, max(budget // rows.unit_size, 1))]


def tree_width(rows: Rows, tree: np.ndarray) -> int:
    """Columns a tree needs."""
    return int((rows.ends[tree] - 1 - rows.firsts[tree]).sum()) + int(rows.firsts[tree[0]])


def pad_rows(rows: Rows, numbers: np.ndarray, device: torch.device | str = "cpu") -> Micro:
    """Lay rows out as [B, T], padded on the right, without an attention mask.

    In a causal model no token sees what comes after it, so padding needs no mask, whatever id it has. The model does
    not read the last column: nothing is predicted from it.
    """
    seen = _Seen(rows, numbers)
    tokens = seen.tokens.to(device)
    return seen.micro(
        device,
        tokens=tokens,
        inputs=tokens[:, :-1],
        inside=torch.from_numpy(np.arange(seen.width - 1) < seen.ends[:, None] - 1).to(device),
        before=seen.row * (seen.width - 1) + seen.column - 1,
    )


def grow_trees(rows: Rows, trees: Sequence[np.ndarray], device: torch.device | str = "cpu") -> Micro:
    """Lay trees out as [R, W]: the common beginning, then the rest of each row, padded on the right."""
    seen = _Seen(rows, np.concatenate(trees))
    sizes = np.array([len(tree) for tree in trees])
    owner = np.repeat(np.arange(len(trees)), sizes)  # tree of each row
    leaders = np.cumsum(sizes) - sizes  # first row of each tree
    prefix = rows.firsts[seen.numbers]
    suffix = seen.ends - 1 - prefix
    before_it = np.cumsum(suffix) - suffix
    start = prefix + before_it - before_it[leaders][owner]  # column where a row's own tokens begin
    width = int((start + suffix).max())
    inputs = np.zeros((len(trees), width), dtype=np.int64)
    positions, segments = np.zeros_like(inputs), np.full_like(inputs, -1)
    pieces = (
        (np.arange(len(trees)), prefix[leaders] * 0, prefix[leaders], rows.offsets[seen.numbers[leaders]], 0),
        (owner, start, suffix, rows.offsets[seen.numbers] + prefix, 1),
    )
    for where, first_column, counts, source, is_own in pieces:
        piece, inner = _ragged(counts)
        place = where[piece], first_column[piece] + inner
        inputs[place] = rows.tokens[source[piece] + inner]
        positions[place] = inner + (prefix[piece] if is_own else 0)
        segments[place] = piece + 1 if is_own else 0
    of = torch.from_numpy(segments).to(device)
    at = seen.column - 1 - prefix[seen.row]  # -1: predicted by the end of the common beginning
    column = np.where(at < 0, prefix[seen.row] - 1, start[seen.row] + at)
    return seen.micro(
        device,
        tokens=seen.tokens.to(device),
        inputs=torch.from_numpy(inputs).to(device),
        before=owner[seen.row] * width + column,
        positions=torch.from_numpy(positions).to(device),
        inside=of >= 0,
        allowed=_tree_mask(of),
    )


def _ragged(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For pieces of these sizes end to end: number of the piece, and place inside it."""
    piece = np.repeat(np.arange(len(counts)), counts)
    return piece, np.arange(len(piece)) - (np.cumsum(counts) - counts)[piece]


def _tree_mask(segments: Tensor) -> Tensor:
    """bool[R, W, W]: see what came before in the common beginning (0) and in one's own segment; padding (-1) itself."""
    query, key = segments.unsqueeze(2), segments.unsqueeze(1)
    places = torch.arange(segments.shape[1], device=segments.device)
    return ((key == query) | (key == 0)) & (places <= places.unsqueeze(1))


class _Seen:
    """The algorithm's view of some rows: [B, T] padded on the right, cut after the last trained token."""

    def __init__(self, rows: Rows, numbers: np.ndarray) -> None:
        self.rows, self.numbers, self.ends = rows, numbers, rows.ends[numbers]
        self.width = max(int(self.ends.max()), 2)
        places = np.arange(self.width)
        inside = places < self.ends[:, None]
        self.index = np.where(inside, rows.offsets[numbers][:, None] + places, 0)
        self.mask = rows.action_mask[self.index] & inside
        self.row, self.column = np.nonzero(self.mask)
        self.tokens = torch.from_numpy(np.where(inside, rows.tokens[self.index], 0).astype(np.int64))

    def micro(
        self,
        device: torch.device | str,
        *,
        tokens: Tensor,
        inputs: Tensor,
        inside: Tensor,
        before: np.ndarray,
        positions: Tensor | None = None,
        allowed: Tensor | None = None,
    ) -> Micro:
        rows = self.rows
        return Micro(
            batch=MicroBatch(
                tokens=tokens,
                action_mask=torch.from_numpy(self.mask).to(device),
                streams={name: torch.from_numpy(flat[self.index]).to(device) for name, flat in rows.streams.items()},
                **_per_sequence(rows, self.numbers, device),
            ),
            inputs=inputs,
            positions=positions,
            inside=inside,
            allowed=allowed,
            chosen=torch.from_numpy(self.row * self.width + self.column).to(device),
            before=torch.from_numpy(before).to(device),
            temperature=_temperature(rows, self.index[self.row, self.column], self.numbers[self.row], device),
            num_tokens=int(self.ends.sum()) - len(self.numbers),
        )


def _per_sequence(rows: Rows, numbers: np.ndarray, device: torch.device | str) -> dict[str, Tensor]:
    firsts = rows.temperature if len(rows.temperature) == len(rows) else rows.temperature[rows.offsets[:-1]]
    columns = {
        "rollouts": rows.rollouts[numbers],
        "rewards": rows.rewards[numbers],
        "sources": rows.sources[numbers],
        "temperature": firsts[numbers],
    }
    if rows.weights is not None and rows.margins is not None:
        pairs = numbers // 2
        columns |= {"pairs": pairs, "chosen": numbers % 2 == 0}
        columns |= {"weights": rows.weights[pairs], "margins": rows.margins[pairs]}
    return {name: torch.from_numpy(column).to(device) for name, column in columns.items()}


def _temperature(rows: Rows, flat: np.ndarray, owners: np.ndarray, device: torch.device | str) -> Tensor | None:
    per_token = rows.temperature[owners] if len(rows.temperature) == len(rows) else rows.temperature[flat]
    if (per_token == 1.0).all():
        return None
    return torch.from_numpy(per_token).to(device)
