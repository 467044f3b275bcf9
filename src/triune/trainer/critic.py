"""The critic: a second model that says at every trained token what return is still to come."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from triune.algorithms import Divider, MicroBatch, Progress, Term
from triune.errors import CheckpointError
from triune.trainer.body import Body, body_of, spread
from triune.trainer.config import TrainerSettings
from triune.trainer.layout import Micro
from triune.trainer.optimiser import Optimiser

_WEIGHTS, _OPTIMISER = "weights/", "optimiser/"


class Critic(Body):
    """A language model's body under a linear head of one number, with an optimiser of its own.

    The head (float32, even over a body in bfloat16) starts at zero, so every value starts at 0 and the body moves from
    the second update on. Over a policy with an adapter, the critic is the same frozen base, shared and not copied,
    under an adapter of its own that starts as the policy's does; its head is a full one.

    Args:
        model: Whose body it takes; its output head is neither read nor trained. See `copy_for_critic`.
        brick: The algorithm's critic: learning rate, warm-up, and the terms.
        settings: The section `trainer` of a run file; all but the learning rate is shared with the policy.
        precision: As of the policy.
    """

    def __init__(
        self,
        model: Any,
        brick: Any,
        settings: TrainerSettings,
        *,
        precision: Literal["auto", "float32", "bfloat16"] = "auto",
    ) -> None:
        super().__init__(model, precision=precision)
        self.brick = brick
        width = self.base.get_output_embeddings().weight.shape[1]
        self._weight = Parameter(torch.zeros(width, device=self.device))
        self._bias = Parameter(torch.zeros(1, device=self.device))
        inside = {id(value) for value in self._body.parameters() if value.requires_grad}
        self.trainable = {
            **{f"body.{name}": value for name, value in model.named_parameters() if id(value) in inside},
            "head.weight": self._weight,
            "head.bias": self._bias,
        }
        self.optimiser = Optimiser(self.trainable, settings.model_copy(update={"learning_rate": brick.learning_rate}))

    def values(self, micro: Micro) -> Tensor:
        """float32[B, T]: the estimate before each trained token, from the state that predicts it; 0 elsewhere.

        With gradient, unless the caller is inside `torch.no_grad()`.
        """
        hidden = self.hidden(micro).float()
        return spread((hidden * self._weight).sum(-1) + self._bias, micro)  # no matrix product, so no rounded one

    def is_warming_up(self, step: int) -> bool:
        """Whether only the critic is updated in this step (0 is the first)."""
        return step < self.brick.warmup_steps

    # ------------------------------------------------------------------------------------------- one update

    def open(self, micros: Sequence[Micro], progress: Progress, num_rollouts: int) -> Divider:
        """Count the units of an update's value loss."""
        batches = [micro.batch for micro in micros]
        terms: Any = _Terms(self.brick)
        return Divider(terms, batches, state={}, progress=progress, num_rollouts=num_rollouts)

    def backward(self, divider: Divider, micro: Micro) -> None:
        """Add one micro-batch's gradient."""
        loss = divider.loss(micro.batch.with_values(self.values(micro)))
        if loss.requires_grad:
            loss.backward()

    def apply(self, divider: Divider, step: int) -> tuple[dict[str, float], bool]:
        """Move the weights, unless loss or gradient is not finite; metrics, and whether they moved."""
        found = divider.metrics()
        del found["empty_terms"]
        loss = found.pop("loss")
        metrics = self.brick.summarise(found)
        if not math.isfinite(loss):
            self.optimiser.clear()
            return {**metrics, "critic_grad_norm": math.nan}, False
        updated = self.optimiser.update(step)
        self.tidy()
        return {**metrics, "critic_grad_norm": updated.grad_norm}, updated.is_applied

    # --------------------------------------------------------------------------------------------- saving

    def state(self) -> dict[str, Tensor]:
        """Weights and optimiser state, as a checkpoint holds them."""
        weights = {_WEIGHTS + name: value.detach() for name, value in self.trainable.items()}
        return {**weights, **{_OPTIMISER + name: value for name, value in self.optimiser.state().items()}}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state` returned.

        Raises:
            CheckpointError: There is nothing to take, or it is another critic's.
        """
        weights = {name.removeprefix(_WEIGHTS): value for name, value in state.items() if name.startswith(_WEIGHTS)}
        if weights.keys() != self.trainable.keys():
            odd = sorted(weights.keys() ^ self.trainable.keys())[0]
            found = f"its critic differs from this one, e.g. {odd}" if weights else "it holds no critic"
            raise CheckpointError("checkpoint", found, "the critic that was trained", "start anew")
        with torch.no_grad():
            for name, value in weights.items():
                self.trainable[name].copy_(value)
        moments = {name: value for name, value in state.items() if name.startswith(_OPTIMISER)}
        self.optimiser.load({name.removeprefix(_OPTIMISER): value for name, value in moments.items()})


@dataclass(frozen=True)
class _Terms:
    """A critic brick as the divider wants it."""

    brick: Any

    @property
    def needs(self) -> frozenset[str]:
        return self.brick.needs

    def terms(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        return self.brick(batch, state, progress)


def copy_for_critic(model: Any) -> Any:
    """A model with a trainable body of its own; frozen weights and the output head are the very same tensors."""
    own = {id(value) for value in body_of(model).parameters() if value.requires_grad}
    return copy.deepcopy(model, {id(value): value for value in model.parameters() if id(value) not in own})
