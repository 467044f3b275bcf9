"""Is the gradient of a loss the slope of its value? Asked in float64, one number at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from triune import registry
from triune.algorithms import Divider
from triune.testing.batches import Leaf, Row
from triune.testing.layouts import WHERE, backward, gradient, whole
from triune.testing.proofs import Case

STEP = 1e-6
KINK = 1e-4
"""Slopes to the left and to the right that differ by more than this belong to a kink: curvature gives about STEP."""


@dataclass(frozen=True)
class Slopes:
    """Gradient and slopes of a value by each of several numbers."""

    gradient: list[float]
    left: list[float]
    right: list[float]

    @property
    def smooth(self) -> list[int]:
        """Positions whose slopes from both sides agree."""
        sides = zip(self.left, self.right, strict=True)
        return [n for n, (left, right) in enumerate(sides) if abs(left - right) <= KINK * (1 + abs(left) + abs(right))]

    def wrong(self) -> list[str]:
        """Smooth positions where the gradient is not the slope, in words."""
        found = []
        for n in self.smooth:
            slope, given = (self.left[n] + self.right[n]) / 2, self.gradient[n]
            if abs(slope - given) > 1e-7 + 1e-5 * abs(slope):
                found.append(f"number {n}: gradient {given:.9g}, slope {slope:.9g}")
        return found


class Constants:
    """What a loss detaches, held at its value where the gradient is taken: `record` once, then `replay`."""

    def __init__(self) -> None:
        self._found: list[Tensor] = []

    @contextmanager
    def record(self) -> Iterator[None]:
        """Remember the result of every `detach` of a tensor that has a gradient, in order."""

        def remember(tensor: Tensor) -> Tensor:
            self._found.append(detach(tensor).clone())
            return self._found[-1]

        detach = torch.Tensor.detach
        with _detaching(remember):
            yield

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Give the remembered results in the same order, whatever is detached now."""
        left = iter(self._found)
        with _detaching(lambda _: next(left)):
            yield


@contextmanager
def _detaching(function: Callable[[Tensor], Tensor]) -> Iterator[None]:
    original: Any = torch.Tensor.detach
    torch.Tensor.detach = function  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.detach = original  # type: ignore[method-assign]


def slopes(case: Case, rows: Sequence[Row], places: Sequence[int], *, state: Any) -> Slopes:
    """Gradient and one-sided differences of one update's loss.

    The brick's `surrogate` says whose value is differentiated: its own; its own with what it detaches held constant;
    or that of another brick of its kind with the same settings as far as that has them.

    Args:
        case: The brick.
        rows: What it is called on. Every behaviour log-prob is known: an unknown one is the policy's own, a constant
            that moves with the policy.
        places: Which numbers of the vector (log-probs, entropies, values) to vary.
        state: The brick's state.
    """
    surrogate = case.says("surrogate", None)
    valued, constants = case, Constants()
    if surrogate and surrogate != "stop_gradient":
        valued = Case(case.kind, surrogate, _shared(case, surrogate))
    leaf = Leaf(rows, torch.float64)
    (batch,) = whole(leaf)
    backward(Divider(case.algorithm, [batch], state=state, progress=WHERE), batch)
    found = gradient(leaf)
    (batch,) = whole(Leaf(rows, torch.float64))
    divider = Divider(valued.algorithm, [batch], state=state, progress=WHERE)
    with constants.record():
        centre = divider.loss(batch).item()

    def value(place: int, change: float) -> float:
        moved = Leaf(rows, torch.float64)
        leaves = [moved.logprobs, moved.entropy, *([] if moved.values is None else [moved.values])]
        vector, offset = leaves[place // len(moved.logprobs)], place % len(moved.logprobs)
        with torch.no_grad():
            vector[offset] += change
        (batch,) = whole(moved)
        if surrogate == "stop_gradient":
            with constants.replay():
                return divider.loss(batch).item()
        return divider.loss(batch).item()

    right = [(value(place, STEP) - centre) / STEP for place in places]
    left = [(centre - value(place, -STEP)) / STEP for place in places]
    return Slopes([found[place].item() for place in places], left, right)


def _shared(case: Case, name: str) -> tuple[tuple[str, Any], ...]:
    """The settings of a case that another brick of its kind has, too."""
    known = {field.name for field in fields(registry.find(case.kind, name, case.kind))}
    own = registry.fields_of(case.brick)
    return tuple((key, value) for key, value in own.items() if key in known)
