"""From leases to laid-out micro-batches, and the streams that are computed once per step without gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from triune.algorithms import Algorithm
from triune.errors import ConfigError
from triune.ports import Lane, Lease
from triune.trainer.layout import MAX_TREE, Micro, lay_out, plan_mini_batches
from triune.trainer.policy import Policy
from triune.trainer.rows import Rows, build_rows

COMPUTED = frozenset({"old_logprobs", "ref_logprobs", "entropy", "behaviour_logprobs"})
"""Streams the trainer makes itself; others must be stored with the experience."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """What one step trains on.

    Attributes:
        rows: All valid sequences.
        minis: Micro-batches of each mini-batch; empty when there is no token to train on.
    """

    rows: Rows
    minis: list[list[Micro]]

    @property
    def micros(self) -> list[Micro]:
        """All micro-batches of the step."""
        return [micro for mini in self.minis for micro in mini]


def stored_streams(algorithm: Algorithm) -> tuple[str, ...]:
    """Names of the streams that an algorithm reads from the experience.

    Raises:
        ConfigError: It needs a critic, which this trainer has not.
    """
    if "values" in algorithm.needs:
        raise ConfigError("algorithm", "needs values", "an algorithm without a critic", "choose grpo or reinforce")
    # An advantage that is no operator is made by the trainer alone; others left their part with the experience.
    made = set() if callable(algorithm.advantage) else {"advantages"}
    return tuple(sorted(algorithm.needs - COMPUTED - made))


def build_batch(
    leases: Sequence[Lease],
    *,
    streams: Sequence[str],
    mini_batches: int,
    budget: int,
    seed: Sequence[int],
    device: torch.device | str,
    widest: int = MAX_TREE,
) -> Batch:
    """Lay out a step: deal rollouts to mini-batches, share common beginnings or sort by length, pad.

    Args:
        leases: What the step consumes.
        streams: From `stored_streams`.
        mini_batches: Updates per epoch.
        budget: Tokens of a micro-batch, padding included.
        seed: Of the deal.
        device: Where tensors go.
        widest: Columns of the widest tree; 0 = no trees.
    """
    rows = build_rows(leases, streams)
    minis = [
        lay_out(rows, numbers, budget, device=device, widest=widest)
        for numbers in plan_mini_batches(rows, mini_batches, seed)
    ]
    return Batch(rows=rows, minis=minis)


async def prepare(batch: Batch, policy: Policy, algorithm: Algorithm, lane: Lane, *, recomputes_old: bool) -> Batch:
    """Add old and reference log-probs, then advantages that need the whole step.

    Every micro-batch is a job of its own on the lane, so that decode steps run in between.
    """
    needs_ref = "ref_logprobs" in algorithm.needs
    minis = batch.minis
    if recomputes_old or needs_ref:
        minis = [
            [await lane.run(_with_streams, micro, policy, recomputes_old, needs_ref) for micro in mini]
            for mini in minis
        ]
    prepared = replace(batch, minis=minis)
    if getattr(algorithm.advantage, "where", "pipeline") != "pipeline" and prepared.micros:
        minis = await lane.run(_with_advantages, prepared, algorithm)
        prepared = replace(prepared, minis=minis)
    return prepared


def _with_streams(micro: Micro, policy: Policy, recomputes_old: bool, needs_ref: bool) -> Micro:
    made: dict[str, Tensor] = {}
    with torch.no_grad():
        if recomputes_old:
            made["old_logprobs"] = policy.logprobs(micro)[0]
        if needs_ref:
            with policy.reference() as reference:
                made["ref_logprobs"] = reference.logprobs(micro)[0]
    return micro.with_streams(**made)


def _with_advantages(batch: Batch, algorithm: Algorithm) -> list[list[Micro]]:
    with torch.no_grad():
        found = algorithm.batch_advantages(
            [micro.batch for micro in batch.micros], num_rollouts=batch.rows.num_rollouts
        )
    assert found is not None, "the caller looked at `where`"
    values = iter(found)
    return [[micro.with_streams(**next(values)) for micro in mini] for mini in batch.minis]
