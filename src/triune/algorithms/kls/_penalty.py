"""What all KL bricks share: the term or the penalty on rewards, its coefficient, and the gradient of the reverse KL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from triune.algorithms.progress import Progress
from triune.algorithms.terms import Term, metric
from triune.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from triune.algorithms.micro_batch import MicroBatch

MOST_ERROR = 0.2
"""The controller's error is clipped to this, so that one strange batch moves the coefficient little."""


def reverse_kl(estimate: Tensor, log_ratio: Tensor) -> Tensor:
    """Show `estimate`, but descend the reverse KL.

    The gradient of KL(policy || reference) is E[log_ratio x grad log p] over the policy's samples (the score function;
    the term E[grad log_ratio] is 0). So the value is the estimate and its derivative by log p is the log-ratio.
    """
    surrogate = log_ratio.detach() * log_ratio
    return estimate.detach() + surrogate - surrogate.detach()


@dataclass(frozen=True, kw_only=True)
class Penalty:
    """Base of the KL bricks: an estimate per token, put into the loss or into the reward.

    With a `target` the coefficient follows the controller of arXiv:1909.08593, section 2.2: after every update it is
    multiplied by 1 + clip(kl / target - 1, ±0.2) / horizon. It is part of the checkpoint.

    Attributes:
        coefficient: Weight of the estimate; with a `target`, the first one. The metric `kl` shows the plain estimate.
        place: `loss` adds a term. `reward` subtracts it from the reward of every token instead, between the policy that
            began the step and the reference, so that what a token does to the KL of later ones is credited; only for
            advantages that take rewards of tokens.
        target: Mean of the metric `kl` to steer for, in nats per token; null = the coefficient stays.
        horizon: How slow the coefficient is, in updates: each multiplies it by 1 ± 0.2 / horizon at most.
        on_flat_groups: Whether tokens without advantage (a group whose rewards are all equal) are held near the
            reference too.
    """

    coefficient: Annotated[float, Field(ge=0)] = 0.001
    place: Literal["loss", "reward"] = "loss"
    target: Annotated[float, Field(gt=0)] | None = None
    horizon: Annotated[float, Field(ge=1)] = 10.0
    on_flat_groups: bool = True
    descends: ClassVar[str] = "reverse_kl"
    variants: ClassVar[tuple[Mapping[str, Any], ...]] = ({"target": 0.05},)

    def estimate(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        """[B, T]: the estimate between the policy of these log-probs and the reference; its slope is the gradient."""
        raise TypeError(f"{type(self).__name__} has no estimate")

    @property
    def needs(self) -> frozenset[str]:
        """Reference log-probs; in the reward those that began the step; advantages where they tell flat groups."""
        old = {"old_logprobs"} if self.place == "reward" else set()
        return frozenset({"ref_logprobs"} | old | (set() if self.on_flat_groups else {"advantages"}))

    @property
    def expected_gradient(self) -> str:
        """What the term descends on samples of the policy; in the reward it is no term."""
        return self.descends if self.place == "loss" else "nothing"

    def __call__(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """Yield `kl`, never multiplied by the coefficient, and `kl_coefficient` where that adapts."""
        mask, weight = batch.action_mask, self.weight(state)
        if not self.on_flat_groups:
            mask = mask & (batch.advantages != 0)
        value = self.estimate(batch.logprobs, batch)
        found = [Term("kl", value, mask, weight) if self.place == "loss" else metric("kl", value, mask)]
        if self.target is not None:
            found.append(metric("kl_coefficient", value.detach().new_full(mask.shape, weight), mask))
        return found

    def token_penalty(self, batch: MicroBatch, state: Mapping[str, Any]) -> Tensor:
        """[B, T]: what `place: reward` subtracts from the reward of every token, without gradient."""
        return self.weight(state) * self.estimate(batch.old_logprobs, batch).detach()

    def weight(self, state: Mapping[str, Any]) -> float:
        """The coefficient now."""
        return state.get("coefficient", self.coefficient)

    def state0(self) -> dict[str, Any]:
        """The coefficient, when it adapts."""
        return {} if self.target is None else {"coefficient": self.coefficient}

    def update(self, state: Mapping[str, Any], stats: Mapping[str, float]) -> dict[str, Any]:
        """Raise the coefficient where `kl` is above the target, lower it below."""
        if self.target is None or "kl" not in stats:
            return dict(state)
        error = min(max(stats["kl"] / self.target - 1, -MOST_ERROR), MOST_ERROR)
        return {"coefficient": state["coefficient"] * (1 + error / self.horizon)}

    def check(self, where: str) -> None:
        """Raise ConfigError for fields that exclude each other."""
        if self.target is not None and self.coefficient == 0:
            found = "found 0 with a `target`, and a factor never moves it"
            raise ConfigError(f"{where}.coefficient", found, "", "write a first one, e.g. `coefficient: 0.001`")
        if self.place == "reward" and not self.on_flat_groups:
            found = "found false with `place: reward`, where advantages are not made yet"
            raise ConfigError(f"{where}.on_flat_groups", found, "", "write `on_flat_groups: true`, or `place: loss`")
