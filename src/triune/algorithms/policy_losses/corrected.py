"""A correction for samples of another policy, around any loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from triune.algorithms.policy_losses._surrogate import above_behaviour, with_weight
from triune.algorithms.policy_losses.ppo_clip import PPOClip
from triune.algorithms.progress import Progress
from triune.algorithms.terms import Term, metric
from triune.errors import ConfigError
from triune.registry import brick, brick_field

if TYPE_CHECKING:
    from torch import Tensor

    from triune.algorithms.micro_batch import MicroBatch


@brick("policy_loss")
@dataclass(frozen=True, kw_only=True)
class Corrected:
    """Correct a loss for the gap between the policy that sampled and the one that is trained.

    Engines round otherwise than the trainer, and stale samples come from older weights. With rho = old / behaviour the
    advantages of the loss inside are multiplied by a weight without gradient, which multiplies a loss that is linear
    in A:
    `truncate`: rho clamped to [low, high] (TIS; `level: sequence` for the sequence's).
    `mask`: rho inside [low, high], 0 outside; the token stays in the count (IcePop: `low: 0.5`, `high: 5`).
    `reject`: 1 inside, and outside the token (or sequence) is left out of the count as if it had not been sampled.
    `level` says whose rho: the token's, the product over the sequence, or the geometric mean, which is no importance
    weight but measures the mismatch of long answers alike. A token of unknown behaviour has rho = 1.

    Per token the weight is exact given the prefix only; per sequence it is unbiased, up to the bounds, and of a
    variance that grows with the length. On-policy the loss inside is unchanged.

    Source: TIS, Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; IcePop,
    arXiv:2510.18855, section 3; sequence level, Liu et al. 2025, "When speed kills stability".

    Attributes:
        loss: The loss inside.
        mode: What is done with rho.
        level: Whose rho.
        low: Lower bound of rho.
        high: Upper bound of rho.
        ratio: `old` = of the policy that began the step, as published, which needs its log-probs. `new` = of the
            policy being trained, which spares a pass where a step has one update.
    """

    loss: Any = brick_field("policy_loss", PPOClip())
    mode: Literal["truncate", "mask", "reject"] = "truncate"
    level: Literal["token", "sequence", "geometric"] = "token"
    low: Annotated[float, Field(ge=0)] = 0.0
    high: Annotated[float, Field(gt=0)] = 2.0
    ratio: Literal["old", "new"] = "old"

    variants: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"loss": "gspo", "mode": "mask", "level": "sequence", "low": 0.5},
        {"loss": "reinforce", "ratio": "new"},
        {"loss": "gpg", "mode": "mask", "low": 0.5, "ratio": "new"},
        {"loss": "m2po", "mode": "reject", "level": "geometric", "low": 0.9, "high": 1.1},
    )

    def __call__(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """Yield what the loss inside yields, and the metrics `behaviour_weight` and `behaviour_bound_ratio`."""
        rho, known = self.rho(batch), batch.known_behaviour
        is_inside = (rho >= self.low) & (rho <= self.high)
        if self.mode == "truncate":
            weight = rho.clamp(self.low, self.high)
        else:
            kept = rho if self.mode == "mask" else rho.new_ones(rho.shape)
            weight = kept.where(is_inside, rho.new_zeros(()))
        if self.mode == "reject":
            inner = replace(batch, action_mask=batch.action_mask & is_inside)
        else:
            inner = with_weight(batch, weight)
        return [
            *self.loss(inner, state, progress),
            metric("behaviour_weight", weight, known),
            metric("behaviour_bound_ratio", (~is_inside).to(rho.dtype), known),
        ]

    def rho(self, batch: MicroBatch) -> Tensor:
        """[B, T]: the ratio at its level, the same for all tokens of a sequence where it is the sequence's."""
        log_rho = above_behaviour(batch, batch.old_logprobs if self.ratio == "old" else batch.logprobs)
        if self.level == "sequence":
            log_rho = batch.spread(batch.segment_sum(log_rho, batch.known_behaviour))
        elif self.level == "geometric":
            log_rho = batch.spread(batch.segment_mean(log_rho, batch.known_behaviour))
        return log_rho.exp()

    @property
    def needs(self) -> frozenset[str]:
        """What the loss inside needs, and the log-probs that began the step."""
        return frozenset(self.loss.needs) | ({"old_logprobs"} if self.ratio == "old" else set())

    @property
    def is_decoupled(self) -> bool:
        """Whether behaviour and old are used separately."""
        return self.ratio == "old" or getattr(self.loss, "is_decoupled", False)

    @property
    def expected_gradient(self) -> str:
        """That of the loss inside: on-policy rho is 1."""
        return self.loss.expected_gradient

    @property
    def gradient_scale(self) -> float:
        """That of the loss inside."""
        return getattr(self.loss, "gradient_scale", 1.0)

    @property
    def surrogate(self) -> str | None:
        """With `ratio: new` the weight is a constant for the gradient."""
        return "stop_gradient" if self.ratio == "new" else getattr(self.loss, "surrogate", None)

    def state0(self) -> dict[str, Any]:
        """State of the loss inside."""
        return self.loss.state0() if hasattr(self.loss, "state0") else {}

    def update(self, state: Mapping[str, Any], stats: Mapping[str, float]) -> dict[str, Any]:
        """New state of the loss inside."""
        return self.loss.update(state, stats) if hasattr(self.loss, "update") else dict(state)

    def check(self, where: str) -> None:
        """Raise ConfigError where the correction would do nothing, or cannot be done."""
        inside = getattr(self.loss, "__brick__", (None, type(self.loss).__name__))[1]
        if "advantages" not in self.loss.needs:
            found = f"found {inside}, which has no advantages to weigh"
            raise ConfigError(f"{where}.loss", found, "", f"write `policy_loss: {inside}` without `corrected`")
        if getattr(self.loss, "is_decoupled", False):
            found = f"found {inside}, which is corrected already"
            raise ConfigError(f"{where}.loss", found, "", "write `loss: ppo_clip`")
        if self.low >= self.high:
            raise ConfigError(
                f"{where}.low", f"found {self.low} with `high: {self.high}`", "less than that", "lower it"
            )
        if self.ratio == "new" and self.mode == "reject":
            found = "found 'new' with `mode: reject`, whose counts would change with the new log-probs"
            raise ConfigError(f"{where}.ratio", found, "", "write `ratio: old`")
        if hasattr(self.loss, "check"):
            self.loss.check(f"{where}.loss")
