"""Rows of all roles merged into one mapping per step."""

from __future__ import annotations

from collections.abc import Mapping


class StepMerger:
    """Averages what the other roles logged during a step and adds the trainer's own values.

    A step is complete with the trainer's first row of it. Without a trainer (`triune explore`) it is complete when a
    row of a later step arrives.
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._last = -1
        self._current = -1
        self._has_trainer = False

    def add(self, role: str, step: int, metrics: Mapping[str, float]) -> tuple[int, dict[str, float]] | None:
        """Take a row; returns `(step, merged metrics)` when it completes a step."""
        if role == "trainer":
            self._has_trainer = True
            if step > self._last:
                merged = self._take()
                merged.update(metrics)
                self._last = step
                return step, merged
            self._add(metrics)
            return None
        done = None
        if not self._has_trainer and self._current >= 0 and step > self._current:
            done = self._current, self._take()
        self._current = max(step, self._current)
        if "idle_ratio" in metrics:
            metrics = {**metrics, f"idle_ratio/{role}": metrics["idle_ratio"]}
        self._add(metrics)
        return done

    def rest(self) -> tuple[int, dict[str, float]] | None:
        """What is left when a run without a trainer ends."""
        if self._has_trainer or not self._sums:
            return None
        return self._current, self._take()

    def _add(self, metrics: Mapping[str, float]) -> None:
        sums, counts = self._sums, self._counts
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + value
            counts[name] = counts.get(name, 0) + 1

    def _take(self) -> dict[str, float]:
        summed = ("time/", "num_")
        merged = {
            name: total if name.startswith(summed) else total / self._counts[name] for name, total in self._sums.items()
        }
        self._sums.clear()
        self._counts.clear()
        return merged
