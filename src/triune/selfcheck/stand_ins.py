"""What stands around a trainer that makes one step on given experience: a buffer, a monitor, a checkpoint folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from triune.ports import Lease, WeightUpdate
from triune.trainer import TrainState


class Given:
    """The part of the port `Buffer` that a trainer calls: leases what it was given, once, and issues versions.

    Args:
        leases: What the step consumes.
    """

    def __init__(self, leases: Sequence[Lease] = ()) -> None:
        self.leases, self.published = list(leases), list[WeightUpdate]()
        self.epoch = 0

    async def lease(self, num: int, **bounds: Any) -> list[Lease]:
        """Everything at once; nothing the second time."""
        leases, self.leases = self.leases, []
        return leases

    async def begin_version(self, step: int) -> int:
        """The next number."""
        return len(self.published)

    async def commit_version(self, update: WeightUpdate) -> None:
        """Remember it."""
        self.published.append(update)

    async def latest_version(self) -> WeightUpdate | None:
        """The newest."""
        return self.published[-1] if self.published else None

    async def resume_at(self, **place: Any) -> None:
        """Nothing was consumed elsewhere."""

    async def renew(self) -> None:
        """Nobody else takes the run over."""

    async def secure(self) -> None:
        """There is no disk."""

    async def ack(self, uses: Sequence[tuple[str, int]], **place: Any) -> None:
        """Nobody asks later."""

    async def finish(self, reason: str) -> None:
        """Nobody waits."""


class Kept:
    """The part of `Checkpoints` that a trainer calls, in memory."""

    def __init__(self) -> None:
        self.state: TrainState | None = None
        self.parts: tuple[Any, ...] = ()

    def save(
        self,
        state: TrainState,
        weights: Mapping[str, Any],
        optimiser: Mapping[str, Any],
        published: Mapping[str, Any] | None = None,
        critic: Mapping[str, Any] | None = None,
        fence: Any = None,
    ) -> Any:
        """Keep copies: the weights go on changing. Nobody else takes the run over, so `fence` is not asked."""
        self.state = state
        parts = (weights, optimiser, published, critic)
        self.parts = tuple(copies(part) if part else part for part in parts)
        return _Nowhere()

    @property
    def optimiser(self) -> Mapping[str, Any]:
        """State of the optimiser."""
        return self.parts[1]


class _Nowhere:
    name = "in memory"


class Rows:
    """The port `Monitor`, which keeps the metrics."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, Mapping[str, float]]] = []

    def log(self, metrics: Mapping[str, float], *, role: str, step: int) -> None:
        """Keep a row."""
        self.rows.append((role, dict(metrics)))

    def note(self, text: str) -> None:
        """Nobody reads it."""

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Time is measured outside."""
        yield

    @contextmanager
    def waiting(self, role: str, for_what: str) -> Iterator[None]:
        """Nobody looks."""
        yield

    @property
    def step(self) -> Mapping[str, float]:
        """Metrics of the trainer's step; empty when it made none."""
        found = [metrics for role, metrics in self.rows if role == "trainer" and "num_updates" in metrics]
        return found[-1] if found else {}


def copies(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Copies that nobody else changes."""
    return {name: value.detach().clone() for name, value in tensors.items()}
