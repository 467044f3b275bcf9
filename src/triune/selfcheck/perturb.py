"""Weights a little off, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from triune.selfcheck.stand_ins import copies

if TYPE_CHECKING:
    from triune.trainer import Policy

_NOISE = np.random.default_rng(0).standard_normal(65521).astype(np.float32)


def perturb(policy: Policy, strength: float = 0.2) -> None:
    """Move every trained weight by noise of `strength` times its tensor's own spread. Runs on the lane."""
    for number, value in enumerate(policy.trainable.values()):
        spread = float(value.detach().float().std()) if value.numel() > 1 else 0.0
        noise = np.resize(np.roll(_NOISE, number), value.numel()).reshape(value.shape)
        value.data.add_(value.data.new_tensor(noise * (strength * spread if spread > 0 else 0.05)))


@contextmanager
def restored(policy: Policy) -> Iterator[None]:
    """Afterwards the trained weights are what they were before, bit for bit."""
    before = copies(policy.trainable)
    try:
        yield
    finally:
        for name, value in policy.trainable.items():
            value.data.copy_(before[name])
