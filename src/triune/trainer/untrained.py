"""Rollouts of which nothing is trained and whose rewards count all the same, as where an operator masked them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from triune.algorithms import MicroBatch
from triune.ports import Lease
from triune.records import Experience, Group
from triune.trainer.derived import with_derived
from triune.trainer.layout import pad_rows
from triune.trainer.rows import Rows, build_rows


def build_untrained(
    groups: Sequence[Group], rows: Rows, advantage: Any, derived: Sequence[str], device: torch.device | str
) -> MicroBatch | None:
    """What a batch advantage is to see beside the micro-batches: their statistics are those of all valid rollouts.

    A sequence whose tokens an operator took out of the loss (and kept as the stream `untrained`) is laid out with the
    tokens that were sampled; a rollout without any with its last token. The group's half of the advantage, which holds
    nothing on tokens that are not trained, is made again for those groups. No model reads this micro-batch.

    Args:
        groups: The batch, as it was leased.
        rows: The batch as columns.
        advantage: The brick; where it needs what a forward pass gives, such sequences stay out.
        derived: From `derived_streams`.
        device: Where tensors go.

    Returns:
        None when there is no such sequence, or nothing to tell the brick of it.
    """
    needs = set(getattr(advantage, "needs", ())) - set(derived)
    numbers = {row.id.rollout: int(number) for row, number in zip(rows.experiences, rows.rollouts, strict=True)}
    trained = {row.id.rollout for row, end in zip(rows.experiences, rows.ends, strict=True) if end}
    found: list[Lease] = []
    for group in groups:
        shown = {str(row.id): row for row in _as_sampled(group, trained)}
        if not shown:
            continue
        whole = group.map(lambda row, shown=shown: shown.get(str(row.id), row))
        credited = cast("Group", advantage(whole)) if callable(advantage) else whole
        records = [row for row in credited.experiences if str(row.id) in shown]
        if all(needs <= row.streams.keys() for row in records):
            found.append(Lease(entry=str(group.id), revision=0, use_no=0, group=group.with_records(records)))
    if not any(lease.group.records for lease in found):
        return None
    names = sorted(needs | ({"advantages"} if callable(advantage) else set()))
    silent = with_derived(build_rows(found, names), derived)
    batch = pad_rows(silent, np.arange(len(silent)), device).batch
    owners = [numbers[row.id.rollout] for row in silent.experiences]
    return replace(batch, rollouts=torch.tensor(owners, device=device))


def _as_sampled(group: Group, trained: set[Any]) -> Iterator[Experience]:
    """Valid sequences of which nothing is trained, with the mask that tells what was sampled."""
    for row in group.experiences:
        if not row.is_valid or bool(row.action_mask[1:].any()) or len(row) < 2:
            continue
        mask = row.streams["untrained"] > 0 if "untrained" in row.streams else np.zeros(len(row), np.bool_)
        if not mask[1:].any():
            if row.id.rollout in trained:
                continue
            mask = np.arange(len(row)) == len(row) - 1
            trained = trained | {row.id.rollout}
        yield row.replace(action_mask=mask)
