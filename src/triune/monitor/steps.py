"""Rows of all roles merged into one mapping per step."""

from __future__ import annotations

from collections.abc import Mapping

Step = tuple[int, dict[str, float]]

_SUMMED = ("time/", "num_")
"""Beginnings of names that add up over the rows of a step; all others are averaged."""


PATIENCE = 3
"""Steps in a row without a row of the explorer after which none is waited for, until it logs again."""


class StepMerger:
    """Averages what the other roles logged for a step and adds the trainer's own values.

    The explorer's row of a step comes just after the trainer's, with the swap to the new weights. So a step is complete
    with both rows, or when the trainer's next one shows that none is coming. Without a trainer (`triune explore`) it is
    complete when a row of a later step arrives.

    Args:
        roles: Roles that log here.
    """

    def __init__(self, roles: tuple[str, ...] = ()) -> None:
        self._silent = 0 if {"explorer", "trainer"} <= set(roles) else PATIENCE
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._held: Step | None = None
        self._last = self._current = -1
        self._has_trainer = False

    def add(self, role: str, step: int, metrics: Mapping[str, float]) -> list[Step]:
        """Take a row; returns the steps that it completes, in order."""
        if role == "trainer":
            return self._add_trainer(step, metrics)
        done = []
        if not self._has_trainer and self._current >= 0 and step > self._current:
            done.append((self._current, self._take()))
        self._current = max(step, self._current)
        self._add(role, metrics)
        if role == "explorer":
            self._silent = 0
            if self._held is not None and step >= self._held[0]:
                done += self._release()
        return done

    def rest(self) -> list[Step]:
        """What is left when the run ends."""
        if self._has_trainer:
            return self._release()
        return [(self._current, self._take())] if self._sums else []

    def _add_trainer(self, step: int, metrics: Mapping[str, float]) -> list[Step]:
        self._has_trainer = True
        done = self._release()
        self._silent += len(done)
        if step <= self._last:
            self._add("trainer", metrics)
            return done
        self._last, self._held = step, (step, dict(metrics))
        return done if self._silent < PATIENCE else done + self._release()

    def _release(self) -> list[Step]:
        if self._held is None:
            return []
        (step, metrics), self._held = self._held, None
        return [(step, {**self._take(), **metrics})]

    def _add(self, role: str, metrics: Mapping[str, float]) -> None:
        sums, counts = self._sums, self._counts
        for name, value in metrics.items():
            if name == "idle_ratio":
                name = f"idle_ratio/{role}"
            sums[name] = sums.get(name, 0.0) + value
            counts[name] = counts.get(name, 0) + 1

    def _take(self) -> dict[str, float]:
        counts = self._counts
        merged = {
            name: total if name.startswith(_SUMMED) else total / counts[name] for name, total in self._sums.items()
        }
        self._sums.clear()
        counts.clear()
        return merged
