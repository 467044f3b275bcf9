"""One step of the run's trainer, with everything it left behind, and the numbers of two of them compared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from triune.config import RunConfig
from triune.launcher.trainer_side import TrainerSide
from triune.selfcheck.stand_ins import Kept

_FIRST_MOMENT = "exp_avg/"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A trainer after its first step.

    Attributes:
        metrics: Of the step; empty when it made none.
        kept: What it would have saved.
        side: The trainer itself, its policy with the new weights.
        before: Every parameter before the step, frozen ones too.
        config: What it was built with.
    """

    metrics: Mapping[str, float]
    kept: Kept
    side: TrainerSide
    before: Mapping[str, Any]
    config: RunConfig

    @cached_property
    def gradient(self) -> dict[str, Any]:
        """The clipped gradient of the step's loss: after one update AdamW's first moment is (1 - beta) times it."""
        share = 1.0 - self.config.trainer.betas[0]
        moments = {name: value for name, value in self.kept.optimiser.items() if name.startswith(_FIRST_MOMENT)}
        return {name.removeprefix(_FIRST_MOMENT): value / share for name, value in moments.items()}

    @cached_property
    def whole_gradient(self) -> dict[str, Any]:
        """The gradient before it was clipped: clipping would hide a wrong factor."""
        scale = max(1.0, self.metrics["grad_norm"] / self.config.trainer.max_grad_norm)
        return {name: value * scale for name, value in self.gradient.items()}

    @property
    def loss(self) -> float:
        """NaN when the step made no update."""
        return self.metrics.get("loss", math.nan)

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient are numbers."""
        return math.isfinite(self.loss) and math.isfinite(self.metrics.get("grad_norm", math.nan))


@dataclass(frozen=True)
class Difference:
    """How two sets of tensors differ: the norm of the difference over the norm of the first, and where it is worst."""

    relative: float
    worst: str


def norm_of(tensors: Mapping[str, Any]) -> float:
    """Euclidean norm over all tensors."""
    return math.sqrt(sum(float(value.double().norm()) ** 2 for value in tensors.values()))


def compare(one: Mapping[str, Any], other: Mapping[str, Any]) -> Difference:
    """Compare tensors by name; a tensor that only one side has counts as all different."""
    squares = {}
    for name in one.keys() | other.keys():
        if name in one and name in other:
            squares[name] = float((one[name].double() - other[name].double()).norm()) ** 2
        else:
            squares[name] = math.inf
    worst = max(squares, key=lambda name: squares[name], default="")
    size = norm_of(one)
    total = math.sqrt(sum(squares.values()))
    return Difference(total / size if size else (0.0 if total == 0 else math.inf), worst)


def cosine(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Cosine of the angle between two gradients over the parameters that both have; 0 when one of them is 0."""
    names = one.keys() & other.keys()
    product = sum(float((one[name].double() * other[name].double()).sum()) for name in names)
    size = norm_of({name: one[name] for name in names}) * norm_of({name: other[name] for name in names})
    return product / size if size else 0.0
