"""Log-probs of recorded tokens under the trainer's policy, in any layout, found again per experience."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from triune.records import Experience, Group
from triune.selfcheck.rig import experiences_of, leases_of
from triune.trainer.batch import build_batch
from triune.trainer.layout import MAX_TREE

if TYPE_CHECKING:
    from triune.trainer import Policy
    from triune.trainer.layout import Micro

Key = tuple[bytes, bytes, bytes]
"""Tokens up to the last trained one, which of them are trained, and the temperature: equal keys, equal log-probs."""

WEIGHT = "selfcheck_weight"
"""Name of the stream that holds what a row's log-probs are multiplied by."""


class Layout(NamedTuple):
    """How rows are laid out: tokens of a micro-batch, and columns of the widest tree (0 = no trees)."""

    budget: int
    widest: int = MAX_TREE


def layouts(policy: Policy) -> dict[str, Layout]:
    """Ways to lay the same rows out: what a run does, padded rows without shared beginnings, and every row alone."""
    budget = policy.tokens_per_micro_batch
    return {
        "as a run does": Layout(budget),
        "padded": Layout(budget, 0),
        "alone": Layout(1, 0),
    }


def micros_of(
    policy: Policy, groups: Sequence[Group], streams: Sequence[str] = (), *, layout: Layout | None = None
) -> list[Micro]:
    """Lay out the experiences of some groups."""
    batch = build_batch(
        leases_of([group.with_records(experiences_of(group)) for group in groups]),
        streams=streams,
        mini_batches=1,
        seed=(0, 0),
        device=policy.device,
        **(layout or Layout(policy.tokens_per_micro_batch))._asdict(),
    )
    return batch.micros


def score(policy: Policy, groups: Sequence[Group], layout: Layout | None = None) -> dict[Key, np.ndarray]:
    """float32[n] per experience: log-probs of its trained tokens. Runs on the lane."""
    found: dict[Key, np.ndarray] = {}
    for micro in micros_of(policy, groups, layout=layout):
        logprobs = policy.logprobs(micro)[0].detach().float().cpu().numpy()
        mask, tokens = micro.batch.action_mask.cpu().numpy(), micro.batch.tokens.cpu().numpy()
        temperature = _temperatures(micro, mask)
        for row in range(len(tokens)):
            key = _key(tokens[row], mask[row], temperature[row][mask[row]])
            if key is not None:
                found[key] = logprobs[row][mask[row]]
    return found


def _temperatures(micro: Micro, mask: np.ndarray) -> np.ndarray:
    """The temperatures that stand with the experience, not those that the forward pass was given."""
    per_row = micro.batch.temperature
    assert per_row is not None, "a batch of experiences"
    return np.broadcast_to(per_row.cpu().numpy()[:, None], mask.shape)


def key_of(row: Experience) -> Key | None:
    """Where `score` keeps an experience; None when nothing of it is trained."""
    mask = row.action_mask.copy()
    mask[:1] = False
    first = row.temperature if isinstance(row.temperature, float | int) else row.temperature[0]
    return _key(row.tokens, mask, np.full(int(mask.sum()), first, np.float32))


def trained_part(row: Experience, values: np.ndarray) -> np.ndarray:
    """The entries of a stream that `score` speaks of."""
    mask = row.action_mask.copy()
    mask[:1] = False
    return values[mask]


def _key(tokens: np.ndarray, mask: np.ndarray, temperature: np.ndarray) -> Key | None:
    places = np.flatnonzero(mask)
    if not places.size:
        return None
    end = int(places[-1]) + 1
    heat = temperature[:1].astype(np.float32).tobytes()
    return tokens[:end].astype(np.int64).tobytes(), mask[:end].tobytes(), heat


def gradient_of(
    policy: Policy, groups: Sequence[Group], weights: Mapping[str, float] | None = None, layout: Layout | None = None
) -> dict[str, Any]:
    """Gradient of the sum of log-probs, each experience's times its weight. Runs on the lane.

    Args:
        policy: Whose gradients are cleared before and after.
        groups: Rows.
        weights: By `str(experience.id)`; None = 1 for all.
        layout: Of the rows.
    """
    weighted = [group.with_records([_with_weight(row, weights) for row in experiences_of(group)]) for group in groups]
    _clear(policy)
    for micro in micros_of(policy, weighted, (WEIGHT,), layout=layout):
        logprobs = policy.logprobs(micro)[0]
        (logprobs * micro.batch.stream(WEIGHT)).sum().backward()
    found = {name: value.grad.detach().clone() for name, value in policy.trainable.items() if value.grad is not None}
    _clear(policy)
    return found


def _with_weight(row: Experience, weights: Mapping[str, float] | None) -> Experience:
    weight = 1.0 if weights is None else weights[str(row.id)]
    return row.with_streams(**{WEIGHT: np.full(len(row), weight, dtype=np.float32)})


def _clear(policy: Policy) -> None:
    for value in policy.trainable.values():
        value.grad = None
