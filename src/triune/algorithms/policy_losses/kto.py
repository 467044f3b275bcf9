"""Kahneman-Tversky optimisation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from triune.algorithms.progress import Progress
from triune.algorithms.terms import Term, metric
from triune.registry import brick

if TYPE_CHECKING:
    from triune.algorithms.micro_batch import MicroBatch


@brick("policy_loss")
@dataclass(frozen=True, kw_only=True)
class KTO:
    """Learn from single answers that were called desirable or not, with the value function of prospect theory.

    With r = beta x log(policy / reference) of a whole answer and the reference point z, a desirable answer costs
    desirable_weight x (1 - sigmoid(r - z)), another one undesirable_weight x (1 - sigmoid(z - r)); no gradient goes
    through z. Far from z the gradient vanishes in both directions, so outliers and wrong labels hardly pull.

    The paper's z is beta x KL(policy || reference), estimated on answers to *other* prompts of the micro-batch, which
    costs a second forward pass and depends on how the batch was cut. Here z is beta x max(0, m), m a running mean of
    the log-ratio over the labelled answers of past updates (all ranks, each answer once). So m is *not* an estimate of
    that KL: like the reward shift of BCO it says where the data's answers stand on average. It is 0 at the reference,
    as the KL is, lags one update behind, and is saved with the checkpoint.

    Source: arXiv:2402.01306, eq. 8; mean reward as reference point: BCO, arXiv:2404.04656.

    Attributes:
        beta: Reward per nat of log-ratio.
        desirable_weight: Weight of desirable answers. With few of them raise it, so that
            weight x number is within 1 to 4/3 of the other side's.
        undesirable_weight: Weight of the others.
        memory: Share of the running mean that an update keeps.
    """

    beta: Annotated[float, Field(gt=0)] = 0.1
    desirable_weight: Annotated[float, Field(ge=0)] = 1.0
    undesirable_weight: Annotated[float, Field(ge=0)] = 1.0
    memory: Annotated[float, Field(ge=0, lt=1)] = 0.9
    needs: ClassVar[frozenset[str]] = frozenset({"ref_logprobs"})
    unit: ClassVar[str] = "sequence"
    reads: ClassVar[str] = "labels"
    expected_gradient: ClassVar[str] = "improves_reward"

    def state0(self) -> dict[str, float]:
        """The policy is the reference: nothing has moved."""
        return {"mean_log_ratio": 0.0}

    def __call__(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """Yield `policy_loss`, and the metrics `log_ratio`, `reference_point`, `chosen_reward`, `rejected_reward`."""
        assert batch.rewards is not None, "a batch without rewards"
        log_ratio = batch.segment_sum(batch.logprobs - batch.ref_logprobs, batch.action_mask)
        point = self.beta * max(0.0, state["mean_log_ratio"])
        counted = batch.segment_any(batch.action_mask) & ~batch.rewards.isnan()
        good, rewards = batch.rewards > 0, self.beta * log_ratio
        wins, losses = (point - rewards).sigmoid(), (rewards - point).sigmoid()  # 1 - sigmoid(x) = sigmoid(-x)
        loss = (self.desirable_weight * wins).where(good, self.undesirable_weight * losses)
        return [
            Term("policy_loss", loss, counted, per="sequence"),
            metric("log_ratio", log_ratio, counted, per="sequence"),
            metric("reference_point", log_ratio.new_full(log_ratio.shape, point), counted, per="sequence"),
            metric("chosen_reward", rewards, counted & good, per="sequence"),
            metric("rejected_reward", rewards, counted & ~good, per="sequence"),
        ]

    def update(self, state: Mapping[str, Any], stats: Mapping[str, float]) -> dict[str, float]:
        """Move the running mean towards this update's mean log-ratio."""
        seen = stats.get("log_ratio", state["mean_log_ratio"])
        return {"mean_log_ratio": self.memory * state["mean_log_ratio"] + (1 - self.memory) * seen}
