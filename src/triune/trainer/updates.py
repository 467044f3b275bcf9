"""The optimiser updates of one step: forward and backward per micro-batch, one division, one clip, one move."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from triune.algorithms import Algorithm, Divider, Progress
from triune.errors import TrainingError
from triune.ports import Lane
from triune.trainer.config import TrainerSettings
from triune.trainer.critic import Critic
from triune.trainer.layout import Micro
from triune.trainer.optimiser import Optimiser
from triune.trainer.policy import Policy

_FINITE = ("loss", "grad_norm", "value_loss", "critic_grad_norm")


@dataclass
class Tally:
    """What the updates of one step did.

    Attributes:
        metrics: Of every update in which all was finite.
        num_applied: Updates that moved the policy.
        num_moved: Updates that moved the policy, the critic or both.
        num_bad: Updates in which something was not finite.
        num_tokens: Tokens that went through the model.
        seconds: Wall-clock time of all updates.
    """

    metrics: list[dict[str, float]] = field(default_factory=list)
    num_applied: int = 0
    num_moved: int = 0
    num_bad: int = 0
    num_tokens: int = 0
    seconds: float = 0.0

    def means(self) -> dict[str, float]:
        """Mean of every metric over the updates that went through."""
        names = dict.fromkeys(name for metrics in self.metrics for name in metrics)
        found = {}
        for name in names:
            values = [metrics[name] for metrics in self.metrics if name in metrics]
            found[name] = sum(values) / len(values)
        return found


class Updater:
    """Makes the updates and keeps the state of the algorithm's bricks.

    Args:
        policy: The model.
        algorithm: Yields the terms.
        optimiser: Moves the weights.
        settings: The section `trainer` of a run file.
        lane: Where torch runs, one micro-batch a job, so that decode steps run in between.
        critic: Is updated once per update, on the same micro-batches; before its warm-up ends, it alone.
    """

    def __init__(
        self,
        policy: Policy,
        algorithm: Algorithm,
        optimiser: Optimiser,
        settings: TrainerSettings,
        lane: Lane,
        critic: Critic | None = None,
    ) -> None:
        self.policy, self.algorithm, self.optimiser, self.critic = policy, algorithm, optimiser, critic
        self.settings, self.lane = settings, lane
        self.bricks: dict[str, Any] = algorithm.state0()
        self.updates = 0
        self.bad_updates = 0
        self._needs_entropy = "entropy" in algorithm.needs

    async def run(self, micros: Sequence[Micro], *, step: int, num_rollouts: int, tally: Tally) -> None:
        """One update.

        A loss or gradient that is not finite leaves that model's weights and the brick state as they were.

        Raises:
            TrainingError: That happened `trainer.max_bad_updates` times in a row.
        """
        began = time.perf_counter()
        progress, critic = Progress(step, self.settings.steps), self.critic
        divider = critic_divider = None
        if critic is not None:
            critic_divider = await self.lane.run(critic.open, micros, progress, num_rollouts)
        if critic is None or not critic.is_warming_up(step):
            divider = await self.lane.run(self._open, micros, progress, num_rollouts)
        for micro in micros:
            if divider is not None:
                await self.lane.run(self._backward, divider, micro)
            if critic is not None:
                await self.lane.run(critic.backward, critic_divider, micro)
            tally.num_tokens += micro.num_tokens
        metrics, is_applied, is_critic_applied = {}, False, False
        if divider is not None:
            metrics, is_applied = await self.lane.run(self._apply, divider, step)
        if critic is not None:
            of_critic, is_critic_applied = await self.lane.run(critic.apply, critic_divider, step)
            metrics = {**metrics, **of_critic}
        tally.seconds += time.perf_counter() - began
        tally.num_applied += is_applied
        tally.num_moved += is_applied or is_critic_applied
        self.updates += is_applied
        self._judge(metrics, step, tally)

    def _judge(self, metrics: dict[str, float], step: int, tally: Tally) -> None:
        """Keep an update's metrics, or count it as bad."""
        odd = [f"{metrics[name]} as {name}" for name in _FINITE if not math.isfinite(metrics.get(name, 0.0))]
        if not odd:
            self.bad_updates = 0
            tally.metrics.append(metrics)
            return
        tally.num_bad += 1
        self.bad_updates += 1
        if self.bad_updates >= self.settings.max_bad_updates:
            raise TrainingError(
                f"step {step + 1}",
                f"{', '.join(odd)}, {self.bad_updates} updates in a row",
                "finite numbers",
                "lower the learning rate, or look at the rewards and log-probs of this step's batch",
            )

    def _open(self, micros: Sequence[Micro], progress: Progress, num_rollouts: int) -> Divider:
        return Divider(
            self.algorithm,
            [micro.batch for micro in micros],
            state=self.bricks,
            progress=progress,
            num_rollouts=num_rollouts,
        )

    def _backward(self, divider: Divider, micro: Micro) -> None:
        logprobs, entropy = self.policy.logprobs(micro, entropy=self._needs_entropy)
        loss = divider.loss(micro.batch.with_logprobs(logprobs, entropy=entropy))
        if loss.requires_grad:
            loss.backward()
        del loss, logprobs, entropy

    def _apply(self, divider: Divider, step: int) -> tuple[dict[str, float], bool]:
        metrics = divider.metrics()
        if not math.isfinite(metrics["loss"]):
            self.optimiser.clear()
            return {**metrics, "grad_norm": math.nan}, False
        updated = self.optimiser.update(step)
        self.policy.tidy()
        metrics["grad_norm"] = updated.grad_norm
        if math.isfinite(updated.grad_norm):
            told = {name: value for name, value in metrics.items() if math.isfinite(value)}
            self.bricks = self.algorithm.update(self.bricks, told)
        return metrics, updated.is_applied
