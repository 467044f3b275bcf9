"""What the explorer counts between two versions: one row of metrics, whatever the number of rollouts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from triune.ports import GroupOutcome

_SUMMED = frozenset({"num_failed", "quarantined", "aborted_groups"})


class Tally:
    """Means over groups of what they measured; sums of what is counted; how long nothing ran."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running = 0
        self._reset()

    def _reset(self) -> None:
        self._since = self._idle_since = self._clock()
        self._idle = 0.0
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._num_groups = 0

    def begin(self) -> None:
        """A group starts."""
        if self._running == 0:
            self._idle += self._clock() - self._idle_since
        self._running += 1

    def end(self) -> None:
        """A group ends."""
        self._running -= 1
        if self._running == 0:
            self._idle_since = self._clock()

    def add(self, metrics: Mapping[str, float]) -> None:
        """Count the metrics of one group."""
        sums, counts = self._sums, self._counts
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + value
            counts[name] = counts.get(name, 0) + 1

    def add_outcome(self, outcome: GroupOutcome) -> None:
        """Count how a group ended."""
        self._num_groups += 1
        self.add(outcome.metrics)
        if outcome.refund is not None:
            name = f"refund_ratio/{outcome.refund.value}"
            self._sums[name] = self._sums.get(name, 0.0) + 1.0

    def take(self) -> dict[str, float]:
        """The row, and start anew; {} when no group ended."""
        if self._num_groups == 0:
            return {}
        now, num = self._clock(), self._num_groups
        if self._running == 0:
            self._idle += now - self._idle_since
        elapsed = max(now - self._since, 1e-9)
        row = {name: self._mean(name, total, num) for name, total in self._sums.items()}
        row["groups"] = float(num)
        row["idle_ratio"] = min(1.0, self._idle / elapsed)
        row["time/rollout_s"] = elapsed - self._idle
        self._reset()
        return row

    def _mean(self, name: str, total: float, num_groups: int) -> float:
        if name in _SUMMED or name.startswith("failed/"):
            return total
        if name.startswith("refund_ratio/"):
            return total / num_groups
        return total / self._counts[name]
