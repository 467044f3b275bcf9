"""One update over the same rows in every layout: whole, split, padded, packed, in another order, on two ranks."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from triune.algorithms import AllSum, Divider, MicroBatch, Progress
from triune.testing.batches import Leaf, Row, add_pairs, add_streams, random_rows

NUM = 9
NUM_ROLLOUTS = (NUM + 1) // 2
WHERE = Progress(step=3, num_steps=10)
RANKS = ([[0, 1, 2, 3, 5, 6], [4, 7, 8]], [list(range(NUM)), []])
"""Rows of each of two ranks: unequal shares, and one rank without any."""

Layout = Callable[[Leaf], list[MicroBatch]]


@cache
def rows(*, is_paired: bool = False, streams: frozenset[str] = frozenset(), missing: float = 0.1) -> list[Row]:
    """Nine ragged rows, one of them without trained tokens; with pairs (0 1) (2 3) (5 6) (7 8) when asked.

    Of the behaviour log-probs a share `missing` is unknown.
    """
    found = random_rows(NUM, seed=11, missing=missing)
    for row in found:
        row.reward -= 0.5
    if is_paired:
        add_pairs(found, seed=5)
    add_streams(found, streams, seed=7)
    return found


@dataclass(frozen=True)
class Update:
    """Loss, gradients by every row's log-probs, entropies and values, and metrics of one update."""

    loss: float
    gradient: Tensor
    metrics: dict[str, float]


def update(
    algorithm: Any,
    of: Sequence[Row],
    layout: Layout | None = None,
    *,
    state: Any = None,
    dtype: torch.dtype = torch.float32,
) -> Update:
    """One update on rows in a layout (default: one padded micro-batch)."""
    leaf = Leaf(of, dtype)
    batches = (layout or whole)(leaf)
    divider = Divider(algorithm, batches, state=algorithm.state0() if state is None else state, progress=WHERE)
    total = 0.0
    for batch in batches:
        total += backward(divider, batch)
    assert all(end.grad is None or end.grad.item() == 0.0 for end in leaf.padding), "the padding got a gradient"
    return Update(total, gradient(leaf), divider.metrics())


def backward(divider: Divider, batch: MicroBatch) -> float:
    """Add a micro-batch's gradient, and return its share of the loss."""
    loss = divider.loss(batch)
    if loss.requires_grad:
        loss.backward(retain_graph=True)
    return loss.item()


def gradient(leaf: Leaf) -> Tensor:
    """Gradients by log-probs, entropies and values, one behind the other."""
    leaves = [leaf.logprobs, leaf.entropy, *([] if leaf.values is None else [leaf.values])]
    return torch.cat([torch.zeros_like(one) if one.grad is None else one.grad for one in leaves])


def agree(found: Update, expected: Update) -> None:
    """Assert that two layouts gave one update, up to float32 rounding.

    Sums are made in float64, but a vectorised kernel (a sigmoid, say) rounds the last elements of a tensor otherwise
    than the first, and a mean over a sequence is rounded after sums in another order.
    """
    assert math.isclose(found.loss, expected.loss, rel_tol=1e-6, abs_tol=1e-9), (found.loss, expected.loss)
    assert torch.allclose(found.gradient, expected.gradient, rtol=3e-6, atol=1e-8)
    assert found.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        assert math.isclose(found.metrics[name], value, rel_tol=1e-6, abs_tol=1e-9), (name, found.metrics[name], value)


def units(*, is_paired: bool) -> list[list[int]]:
    """Rows that may not be separated: single ones, or the halves of pairs."""
    if not is_paired:
        return [[number] for number in range(NUM)]
    return [[0, 1], [2, 3], [4], [5, 6], [7, 8]]


def whole(leaf: Leaf) -> list[MicroBatch]:
    """All rows in one micro-batch."""
    return [leaf.padded(range(NUM))]


def split(num: int, *, is_paired: bool = False) -> Layout:
    """Micro-batches of `num` units."""
    parts = units(is_paired=is_paired)
    chunks = [[number for part in parts[start : start + num] for number in part] for start in range(0, len(parts), num)]
    return lambda leaf: [leaf.padded(chunk) for chunk in chunks]


def stuffed(fill: float) -> Layout:
    """Wide padding and rows of nothing, all of which hold `fill`."""
    return lambda leaf: [leaf.padded(range(NUM), width=40, extra_rows=3, fill=fill)]


def packed(leaf: Leaf) -> list[MicroBatch]:
    """Two lines of segments; garbage in the tail of the first."""
    return [leaf.packed(range(5), tail=6, fill=math.nan), leaf.packed(range(5, NUM))]


def shuffled(leaf: Leaf) -> list[MicroBatch]:
    """The rows in another order, rollouts torn apart; the halves of a pair stay together, some the other way round."""
    return [leaf.padded([4, 8, 7, 0, 1]), leaf.padded([3, 2, 6, 5])]


def on_rank(algorithm: Any, of: Sequence[Row], chosen: Sequence[int], all_sum: AllSum, *, state: Any) -> Update:
    """One rank's part of an update, on the rows it got: its share of loss and gradient, and everybody's metrics."""
    leaf = Leaf(of)
    batches = [leaf.padded(chosen)] if chosen else []
    divider = Divider(algorithm, batches, state=state, progress=WHERE, num_rollouts=NUM_ROLLOUTS, all_sum=all_sum)
    total = math.fsum(backward(divider, batch) for batch in batches)
    return Update(total, gradient(leaf), divider.metrics())


def summed(parts: Sequence[Update]) -> Update:
    """The update that ranks made together."""
    assert all(part.metrics == parts[0].metrics for part in parts), "ranks see other metrics"
    gradients = torch.stack([part.gradient for part in parts])
    return Update(math.fsum(part.loss for part in parts), gradients.sum(0), parts[0].metrics)


def batch_advantages(
    brick: Any, of: Sequence[Row], batches: Callable[[Leaf], list[MicroBatch]], all_sum: AllSum
) -> Any:
    """What a batch advantage makes of rows in a layout: stream → one number per token of all rows, NaN elsewhere."""
    size = sum(len(row) for row in of)
    numbers = iter(range(size))
    leaf = Leaf([replace(row, logprobs=np.array([next(numbers) for _ in row.logprobs], float)) for row in of])
    laid = batches(leaf)
    bare = [replace(batch, policy_logprobs=None, policy_entropy=None, policy_values=None) for batch in laid]
    found: dict[str, Tensor] = {}
    for batch, streams in zip(laid, brick.over_batch(bare, all_sum, NUM_ROLLOUTS), strict=True):
        for name, value in streams.items():
            vector = found.setdefault(name, torch.full((size,), torch.nan, dtype=value.dtype))
            vector[batch.logprobs[batch.action_mask].detach().long()] = value[batch.action_mask]
    return found


def in_threads(work: Callable[[int, AllSum], Any], num: int = 2) -> list[Any]:
    """Run `work(rank, all_sum)` on ranks that are threads, and return what each made."""
    meeting, slots = threading.Barrier(num, timeout=30), [torch.zeros(0)] * num

    def of_rank(rank: int) -> Any:
        def all_sum(vector: Tensor) -> Tensor:
            slots[rank] = vector
            meeting.wait()
            total = torch.stack(slots).sum(0)
            meeting.wait()
            return total

        try:
            return work(rank, all_sum)
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(num) as pool:
        return list(pool.map(of_rank, range(num)))
