"""AdamW with its schedule, clipping and guards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from triune.errors import CheckpointError
from triune.trainer.config import TrainerSettings


@dataclass(frozen=True)
class Updated:
    """How one optimiser update went: the gradient's norm before clipping, and whether weights changed."""

    grad_norm: float
    is_applied: bool


class Optimiser:
    """Changes the trainable weights once per update.

    Args:
        parameters: Name → trainable parameter.
        settings: The section `trainer` of a run file.
    """

    def __init__(self, parameters: Mapping[str, Parameter], settings: TrainerSettings) -> None:
        self._settings = settings
        self._names = {id(value): name for name, value in parameters.items()}
        self._parameters = list(parameters.values())
        matrices = [value for value in self._parameters if value.ndim >= 2]
        vectors = [value for value in self._parameters if value.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=settings.learning_rate, betas=settings.betas, fused=True
        )

    def learning_rate(self, step: int) -> float:
        """Learning rate of a step (0 is the first): linear warm-up, then the schedule. Depends on nothing else."""
        settings = self._settings
        peak, warmup = settings.learning_rate, settings.warmup_steps
        if step < warmup:
            return peak * (step + 1) / warmup
        if settings.schedule == "constant":
            return peak
        done = min((step - warmup) / max(settings.steps - warmup, 1), 1.0)
        return peak * (1.0 - done if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done)))

    def update(self, step: int) -> Updated:
        """Clip and apply the summed gradients, then clear them.

        Nothing changes when the norm is not finite (the gradients are useless), nor when it is exactly 0 (there is
        nothing to learn, and AdamW's momentum would move the weights all the same).
        """
        grads = [value.grad for value in self._parameters if value.grad is not None]
        norm = get_total_norm(grads, foreach=True) if grads else torch.zeros(())
        size = float(norm)
        is_applied = math.isfinite(size) and size > 0.0
        if is_applied:
            if size > self._settings.max_grad_norm:
                with_grads = [value for value in self._parameters if value.grad is not None]
                clip_grads_with_norm_(with_grads, self._settings.max_grad_norm, norm, foreach=True)
            for group in self._adamw.param_groups:
                group["lr"] = self.learning_rate(step)
            self._adamw.step()
        self.clear()
        return Updated(size, is_applied)

    def clear(self) -> None:
        """Forget all gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Running averages and counters as `<kind>/<parameter>` → tensor; empty before the first update."""
        found: dict[str, Tensor] = {}
        for parameter, state in self._adamw.state.items():
            for kind, value in state.items():
                found[f"{kind}/{self._names[id(parameter)]}"] = value.detach()
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state` returned.

        Raises:
            CheckpointError: It is of another model.
        """
        by_name = {name: value for value, name in zip(self._parameters, self._names.values(), strict=True)}
        for key, value in state.items():
            kind, _, name = key.partition("/")
            parameter = by_name.get(name)
            if parameter is None or (value.ndim and value.shape != parameter.shape):
                raise CheckpointError(f"optimiser state {key}", "is of another model", "the model that was trained")
            self._adamw.state[parameter][kind] = value.to(parameter.device, copy=True)  # fused: the counter too
