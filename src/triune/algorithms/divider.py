"""The one place that divides: sums of terms become means over one optimiser update on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from triune.algorithms.micro_batch import MicroBatch
from triune.algorithms.progress import Progress
from triune.algorithms.terms import Constant, Term
from triune.errors import TrainingError

if TYPE_CHECKING:
    from triune.algorithms.algorithm import Algorithm

AllSum = Callable[[Tensor], Tensor]
"""Sums a float64 vector over all ranks; every rank calls it equally often with vectors of one length."""


class Divider:
    """Divides the terms of one optimiser update.

        divider = Divider(algorithm, batches, state=state, progress=progress)   # counts every unit, no gradient
        for batch in batches:
            divider.loss(batch.with_logprobs(forward(batch))).backward()
        metrics = divider.metrics()

    Because each micro-batch is divided by counts of the whole update, losses and gradients of micro-batches and ranks
    are *summed*: never divide by the number of accumulation steps, and multiply by the world size under a wrapper that
    averages gradients. Sums are accumulated in float64.

    Args:
        algorithm: Names the bricks that yield terms.
        batches: All micro-batches of this rank; may be empty on a rank that got no rows.
        state: The bricks' state, from `algorithm.state0()`.
        progress: How far the run is.
        num_rollouts: Rollouts of the update over all ranks; by default what `batches` hold.
        all_sum: Sum over ranks; None on one rank.

    Raises:
        TrainingError: Two terms share a name, or a value and its mask differ in shape.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        batches: Sequence[MicroBatch],
        *,
        state: Mapping[str, Any],
        progress: Progress,
        num_rollouts: int | None = None,
        all_sum: AllSum | None = None,
    ) -> None:
        self.algorithm, self.state, self.progress = algorithm, state, progress
        self._all_sum = all_sum or (lambda vector: vector)
        if num_rollouts is None:
            num_rollouts = _rollouts_in(batches)
        rows = list(batches) or [MicroBatch.blank(streams=tuple(sorted(algorithm.needs)))]
        with torch.no_grad():
            probed = [self._terms(_probe(batch)) for batch in rows]
            self._planned = sum_units(probed, rows, num_rollouts)
        self.counts = count_units(self._planned, self._all_sum)
        nothing = torch.zeros((), dtype=torch.float64, device=rows[0].tokens.device)
        self._sums = dict.fromkeys(self.counts, nothing)
        self._covered = dict.fromkeys(self.counts, nothing)
        self._num_seen = 0

    def loss(self, batch: MicroBatch) -> Tensor:
        """This micro-batch's share of the update's loss: a float64 scalar to call `backward` on."""
        terms = self._terms(batch)
        total, means = divide_terms(terms, self.counts)
        sizes = MaskSums()
        for term in terms:
            self._sums[term.name] = self._sums[term.name] + means[term.name]
            self._covered[term.name] = self._covered[term.name] + sizes(term.mask)
        self._num_seen += 1
        return total

    def metrics(self) -> dict[str, float]:
        """Means over the update and all ranks, to be read after the last `loss`.

        Returns:
            Every term's and metric's unweighted mean (a metric that counted nothing is left out), `loss`, and
            `empty_terms`: how many terms with a weight counted nothing.

        Raises:
            TrainingError: A mask changed with the new log-probs, so the loss was divided by the wrong count.
        """
        if not self.counts:
            return {"loss": 0.0, "empty_terms": 0.0}
        sums = self._all_sum(torch.stack(list(self._sums.values()))).tolist()
        found = dict(zip(self.counts, sums, strict=True))
        self._check_masks()
        weights = {name: units.weight for name, units in self._planned.items()}
        loss = sum(weight * found[name] for name, weight in weights.items() if weight)  # 0 x inf is no number
        empty = [name for name, count in self.counts.items() if count == 0]
        shown = {name: value for name, value in found.items() if name not in empty or weights[name]}
        return {**shown, "loss": loss, "empty_terms": float(sum(weights[name] != 0 for name in empty))}

    def _check_masks(self) -> None:
        if not self._num_seen:
            return
        seen = torch.stack(list(self._covered.values())).tolist()
        planned = torch.stack([self._planned[name].covered for name in self._covered]).tolist()
        for name, now, before in zip(self._covered, seen, planned, strict=True):
            if now != before:
                raise TrainingError(
                    f"algorithm, term {name!r}",
                    f"its mask held {now:.0f} entries in the forward pass and {before:.0f} before it",
                    "a mask that depends on the batch only, and every micro-batch once",
                    "put a gate on the new log-probs into the value",
                )

    def _terms(self, batch: MicroBatch) -> list[Term]:
        return self.algorithm.terms(batch, self.state, self.progress)


class MaskSums:
    """Counts masks, the same tensor only once: most terms of a batch share theirs."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, mask: Tensor) -> Tensor:
        """How many entries hold, as a float64 scalar."""
        if id(mask) not in self._known:
            self._known[id(mask)] = (mask, mask.sum(dtype=torch.float64))
        return self._known[id(mask)][1]


class Units:
    """What one rank's masks of one term hold: a count that adds up over ranks, or which rollouts are present."""

    def __init__(self, term: Term, num_rollouts: int) -> None:
        self.per, self.weight = term.per, term.weight
        size = num_rollouts if self.per == "rollout" else 1
        self.tally = torch.zeros(size, dtype=torch.float64, device=term.mask.device)
        self.covered = self.tally.new_zeros(())

    def add(self, term: Term, batch: MicroBatch, size: Tensor) -> None:
        """Count one micro-batch's mask, of which `size` entries hold."""
        self.covered = self.covered + size
        per_token = term.mask.dim() == 2
        if self.per == "rollout":
            present = batch.segment_any(term.mask) if per_token else term.mask
            self.tally[batch.rollout_numbers[present]] = 1.0
        elif per_token and (self.per == "sequence" or isinstance(self.per, Constant)):
            self.tally += batch.segment_any(term.mask).sum()
        else:
            self.tally += size

    def count(self, tally: Tensor) -> float:
        """The unit's count, from the tally of all ranks."""
        if self.per == "sum":
            return 1.0
        if self.per == "rollout":
            return float((tally > 0).sum())
        return float(tally.sum()) * (self.per.tokens if isinstance(self.per, Constant) else 1.0)


def sum_units(terms: Sequence[Sequence[Term]], batches: Sequence[MicroBatch], num_rollouts: int) -> dict[str, Units]:
    """Units of every term over one rank's micro-batches, by name."""
    units: dict[str, Units] = {}
    for batch, of_batch in zip(batches, terms, strict=True):
        sizes = MaskSums()
        for term in of_batch:
            if term.name not in units:
                units[term.name] = Units(term, num_rollouts)
            units[term.name].add(term, batch, sizes(term.mask))
    return units


def count_units(units: Mapping[str, Units], all_sum: AllSum) -> dict[str, float]:
    """Counts over all ranks, with one collective for all terms."""
    if not units:
        return {}
    tallies = all_sum(torch.cat([one.tally for one in units.values()]))
    parts = tallies.split([len(one.tally) for one in units.values()])
    return {name: one.count(part) for (name, one), part in zip(units.items(), parts, strict=True)}


def divide_terms(terms: Sequence[Term], counts: Mapping[str, float]) -> tuple[Tensor, dict[str, Tensor]]:
    """Weigh and divide the sums of one micro-batch.

    Returns:
        The loss, `sum over terms of weight x sum(value x mask) / count`, in float64 with gradient; and each term's
        unweighted share of its mean, without. A count of zero gives 0.
    """
    total, means = torch.zeros((), dtype=torch.float64), {}
    for term in terms:
        summed = term.value.where(term.mask, term.value.new_zeros(())).sum(dtype=torch.float64)
        mean = summed / counts[term.name] if counts[term.name] else summed * 0.0
        means[term.name] = mean.detach()
        if term.weight:
            total = total + term.weight * mean
    return total, means


def _probe(batch: MicroBatch) -> MicroBatch:
    """The batch before the forward pass. NaN as what it gives: a mask that looks at that cannot come out the same."""
    unknown = torch.full(batch.tokens.shape, torch.nan, device=batch.tokens.device)
    return batch.with_logprobs(unknown, entropy=unknown).with_values(unknown)


def _rollouts_in(batches: Sequence[MicroBatch]) -> int:
    return max((int(batch.rollout_numbers.max()) + 1 for batch in batches if batch.num_sequences), default=0)
