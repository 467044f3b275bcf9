"""The loop that turns experience into better weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from triune.algorithms import Algorithm
from triune.errors import TrainingError
from triune.failpoints import failpoint
from triune.ports import Buffer, Lane, Lease, Monitor, WeightChannel, WeightUpdate
from triune.trainer.allowance import Allowance
from triune.trainer.batch import Batch, build_batch, prepare, stored_streams
from triune.trainer.checkpoint import Checkpoints, TrainState
from triune.trainer.config import TrainerSettings
from triune.trainer.critic import Critic, copy_for_critic
from triune.trainer.derived import derived_streams
from triune.trainer.identity import RunIdentity
from triune.trainer.optimiser import Optimiser
from triune.trainer.policy import Policy
from triune.trainer.rows import describe
from triune.trainer.updates import Tally, Updater


class Trainer:
    """Leases batches, updates the policy, publishes versions, saves checkpoints.

    Args:
        settings: The section `trainer` of a run file.
        policy: The model, with its initial weights.
        algorithm: Names the bricks.
        buffer: Where experience comes from.
        channel: Where weights go.
        lane: Where torch runs.
        monitor: Takes one row per step.
        checkpoints: The run's checkpoint folders.
        every: Steps between two publishes (`sync.every`).
        max_staleness: Versions an experience may be behind (`sync.max_staleness`).
        seed: Of the deal into mini-batches.
        identity: What a checkpoint must agree with.
        resume_from: Folder of a checkpoint to go on from; None starts at step 0.
        critic_model: Model whose body the critic takes, where the algorithm has one; None = the policy's.
        teacher: Frozen model that gives teacher log-probs; None = they are stored with the experience.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        policy: Policy,
        algorithm: Algorithm,
        *,
        buffer: Buffer,
        channel: WeightChannel,
        lane: Lane,
        monitor: Monitor,
        checkpoints: Checkpoints,
        every: int = 1,
        max_staleness: int = 0,
        seed: int = 0,
        identity: RunIdentity | None = None,
        resume_from: Path | str | None = None,
        critic_model: Any = None,
        teacher: Policy | None = None,
    ) -> None:
        self.settings, self.policy, self.algorithm = settings, policy, algorithm
        self.buffer, self.channel, self.lane = buffer, channel, lane
        self.monitor, self.checkpoints = monitor, checkpoints
        self.every, self.max_staleness, self.seed = every, max_staleness, seed
        self.identity = identity or RunIdentity()
        self.resume_from = Path(resume_from) if resume_from is not None else None
        self.step = 0
        self.line: list[tuple[int, int]] = []
        self.exit_reason = ""
        self._streams, self._derived = stored_streams(algorithm, has_teacher=bool(teacher)), derived_streams(algorithm)
        self._recomputes_old = algorithm.recomputes_old(
            num_updates=settings.updates_per_step, max_staleness=max_staleness
        )
        self._budget = settings.tokens_per_micro_batch or policy.tokens_per_micro_batch
        self._allowance = Allowance(
            buffer,
            type(algorithm.sampling).__name__,
            fresh_ratio=getattr(algorithm.sampling, "fresh_ratio", 1.0),
            num=settings.entries_per_step,
            lead=(max_staleness + 1) * every,
        )
        self._optimiser = Optimiser(policy.trainable, settings)
        self.teacher, self.critic = teacher, self._build_critic(critic_model)
        self._updater = Updater(policy, algorithm, self._optimiser, settings, lane, self.critic)
        self._consumed: list[tuple[str, int]] = []
        self._saved_step = -1
        self._newest: WeightUpdate | None = None
        self._untrainable = 0
        self._stop, self._paused_by = "", ""
        self._may_go = asyncio.Event()
        self._may_go.set()
        self._has_begun = False
        if "ref_logprobs" in algorithm.needs:
            policy.keep_reference()

    def _build_critic(self, model: Any) -> Critic | None:
        """Over the policy's initial weights, unless another model is given."""
        brick = self.algorithm.critic
        if not getattr(brick, "makes_values", False):
            return None
        model = copy_for_critic(self.policy.model) if model is None else model
        return Critic(model, brick, self.settings, precision=self.settings.precision)

    # ------------------------------------------------------------------------------------------- the loop

    async def run(self) -> None:
        """Train for `trainer.steps` steps, or until the data ends or `stop` is called.

        consumes: groups of experience     waits for: a full batch
        produces: versions of weights      unblocked by: the explorer's put, or the end of its data

        Raises:
            TrainingError: Updates are not finite, or nothing trainable arrives, several times in a row; or an alarm.
            StoreError: A checkpoint cannot be written.
            FencedError: A newer incarnation has taken the run over; this one leaves no checkpoint.
        """
        await self.begin()
        reason = f"{self.settings.steps} steps done"
        while self.step < self.settings.steps:
            await self._rest()
            if self._stop:
                reason = self._stop
                break
            leases = await self._lease()
            if not leases:
                reason = f"the data ended after {self.step} steps"
                break
            metrics = await self._train(leases)
            self._consumed += [(lease.entry, lease.use_no) for lease in leases]
            self.step += 1
            if self.step % self.every == 0:
                await self._publish()
            try:
                self.monitor.log(metrics, role="trainer", step=self.step)
            except TrainingError:  # an alarm ends the run at this boundary, not at the last checkpoint
                await self.save()
                raise
            if self.settings.save_every and self.step % self.settings.save_every == 0:
                await self.save()
        if self._saved_step != self.step:
            await self.save()
        self.exit_reason = reason
        await self.buffer.finish(reason)

    def stop(self, reason: str) -> None:
        """End after the step that is running, with a checkpoint."""
        self._stop = reason
        self._may_go.set()

    def pause(self, by: str) -> None:
        """Rest after the step that is running, with a checkpoint, until `go_on` or `stop`.

        Rollouts go on until as many groups wait as admission allows.
        """
        self._paused_by = by
        self._may_go.clear()

    def go_on(self) -> None:
        """End a pause."""
        self._may_go.set()

    async def _rest(self) -> None:
        if self._may_go.is_set():
            return
        if self._saved_step != self.step:
            await self.save()
        with self.monitor.waiting("trainer", f"resume: paused by {self._paused_by}"):
            await self._may_go.wait()

    async def begin(self) -> None:
        """Restore the checkpoint, bring the store to it, and offer the first version. `run` does it when nobody has.

        An explorer in the same process starts after this, so that it never acts on what a resume takes back.
        """
        if self._has_begun:
            return
        self._has_begun = True
        if self.resume_from is not None:
            await self._resume(self.resume_from)
        else:
            if self.identity.epoch > 0:
                await self._reset_store((), version=-1, checkpoint="")
            await self._publish()
        self.monitor.log(self._facts(), role="trainer", step=self.step)

    async def _lease(self) -> list[Lease]:
        with self.monitor.waiting("trainer", "a full batch"), self.monitor.timed("trainer/lease"):
            self._allowance.begin(self.step)
            source = cast("Buffer", self._allowance)
            return await self.algorithm.sampling(
                source, self.settings.entries_per_step, step=self.step, max_staleness=self.max_staleness
            )

    async def _publish(self) -> WeightUpdate:
        with self.monitor.timed("trainer/publish"):
            state = await self.lane.run(self.policy.state)
            update = await self.channel.publish(state, step=self.step)
        self.line.append((update.version, update.step))
        self._hold(update)
        failpoint("trainer.publish.after")
        return update

    def _hold(self, update: WeightUpdate) -> None:
        """Keep the newest version fetchable where a checkpoint may fall between two: it saves what is published."""
        if self.every > 1:
            if self._newest is not None:
                self.channel.unpin(self._newest.version)
            self.channel.pin(update.version)
        self._newest = update

    # -------------------------------------------------------------------------------------------- one step

    async def _train(self, leases: Sequence[Lease]) -> dict[str, float]:
        """lease → prepare → (epochs x mini_batches) updates; returns the step's metrics."""
        tally = Tally()
        with self.monitor.timed("trainer/prepare"):
            batch = await self.lane.run(self._lay_out, leases)
            if batch.minis:
                batch = await prepare(
                    batch,
                    self.policy,
                    self.algorithm,
                    self.lane,
                    recomputes_old=self._recomputes_old,
                    critic=self.critic,
                    teacher=self.teacher,
                    state=self._updater.bricks,
                )
        with self.monitor.timed("trainer/update"):
            for epoch in range(self.settings.epochs):
                for number in self._order(len(batch.minis), epoch):
                    await self._updater.run(
                        batch.minis[number], step=self.step, num_rollouts=batch.rows.num_rollouts, tally=tally
                    )
        metrics = tally.means()
        self._guard(leases, batch, tally, metrics)
        return {**metrics, **self._describe_step(leases, batch, tally)}

    def _lay_out(self, leases: Sequence[Lease]) -> Batch:
        return build_batch(
            leases,
            streams=self._streams,
            derived=self._derived,
            mini_batches=self.settings.mini_batches,
            budget=self._budget,
            seed=(self.seed, self.step),
            device=self.policy.device,
        )

    def _order(self, num: int, epoch: int) -> list[int]:
        if num == 1:
            return [0]
        return np.random.default_rng((self.seed, self.step, epoch + 1)).permutation(num).tolist()

    def _guard(self, leases: Sequence[Lease], batch: Batch, tally: Tally, metrics: dict[str, float]) -> None:
        """Count batches in a row that had nothing to train on, and end the run with an example of why."""
        is_trainable = bool(batch.minis) and (
            tally.num_moved > 0 or not metrics.get("empty_terms", 0.0) or batch.is_flat
        )
        self._untrainable = 0 if is_trainable else self._untrainable + 1
        if self._untrainable >= self.settings.max_untrainable_batches:
            raise TrainingError(
                f"step {self.step + 1}",
                f"{self._untrainable} batches in a row held no token to train on; {describe(leases)}",
                "sampled tokens of valid rollouts",
                "look at the workflow, the reward and the operators that mask",
            )

    def _describe_step(self, leases: Sequence[Lease], batch: Batch, tally: Tally) -> dict[str, float]:
        rows = batch.rows
        unknown = np.count_nonzero(np.isnan(rows.streams["behaviour_logprobs"]) & rows.action_mask)
        staleness = [lease.staleness for lease in leases]
        more = {}
        if self.critic is not None:
            more["critic_learning_rate"] = self.critic.optimiser.learning_rate(self.step)
        if num_imported := sum(lease.group.id.run != self.identity.run for lease in leases if self.identity.run):
            more["num_imported"] = float(num_imported)
        return {
            **more,
            **getattr(leases, "metrics", {}),
            "learning_rate": self._optimiser.learning_rate(self.step),
            "staleness": sum(staleness) / len(staleness),
            "staleness_max": float(max(staleness)),
            "tokens_per_s": tally.num_tokens / tally.seconds if tally.seconds else 0.0,
            "tokens_without_behaviour": float(unknown),
            "num_action_tokens": float(rows.num_actions),
            "num_sequences": float(len(rows)),
            "num_invalid": float(rows.num_invalid),
            "num_updates": float(tally.num_applied),
            "bad_updates": float(tally.num_bad),
            "skipped": float(tally.num_moved == 0),
        }

    def _facts(self) -> dict[str, float]:
        """What holds for the whole run and explains its numbers."""
        medium = torch.get_float32_matmul_precision() == "medium"
        of_critic = {}
        if self.critic is not None:
            of_critic["num_critic_parameters"] = float(sum(v.numel() for v in self.critic.trainable.values()))
        return {
            **of_critic,
            "num_parameters": float(self.policy.num_parameters),
            "num_trained_parameters": float(sum(value.numel() for value in self.policy.trainable.values())),
            "float32_matmul_medium": float(medium),
            "bfloat16_compute": float(self.policy.dtype == torch.bfloat16),
            "rounded_masters": float(self.policy.has_rounded_masters),
        }

    # ------------------------------------------------------------------------------------ saving, resuming

    async def save(self) -> Path:
        """Write a checkpoint, then acknowledge what it consumed."""
        with self.monitor.timed("trainer/save"):
            state, weights, optimiser, critic = await self.lane.run(self._capture)
            is_between = self._newest is not None and self._newest.step != self.step
            published = await self.channel.fetch(self._newest) if self._newest and is_between else {}
            await self.buffer.secure()
            # Only disk is touched there, and nobody updates the weights while the trainer waits here.
            path = await asyncio.to_thread(
                self.checkpoints.save, state, weights, optimiser, published, critic, self._fence()
            )
            await self.buffer.ack(state.consumed, checkpoint=path.name, step=self.step)
        self._consumed.clear()
        self._saved_step = self.step
        return path

    def _fence(self) -> Callable[[], None]:
        """For another thread: raises FencedError once a newer incarnation has taken the run over."""
        loop = asyncio.get_running_loop()
        return lambda: asyncio.run_coroutine_threadsafe(self.buffer.renew(), loop).result()

    def _capture(self) -> tuple[TrainState, dict[str, Any], dict[str, Any], dict[str, Any]]:
        state = TrainState(
            step=self.step,
            updates=self._updater.updates,
            line=list(self.line),
            consumed=list(self._consumed),
            bricks=self._updater.bricks,
            bad_updates=self._updater.bad_updates,
            untrainable=self._untrainable,
            rng=torch.get_rng_state().numpy().tobytes().hex(),
            config_hash=self.identity.config_hash,
            data_hash=self.identity.data_hash,
        )
        critic = {} if self.critic is None else self.critic.state()
        return state, dict(self.policy.trainable), self._optimiser.state(), critic

    async def _resume(self, path: Path) -> None:
        state, weights, optimiser = await self.lane.run(self.checkpoints.load, path)
        self.identity.check(path, state)
        critic = await self.lane.run(self.checkpoints.load_critic, path)
        await self.lane.run(self._restore, state, weights, optimiser, critic)
        version = self.line[-1][0] if self.line else -1
        await self._reset_store(state.consumed, version=version, checkpoint=path.name)
        latest = await self.buffer.latest_version()
        published = await self.lane.run(self.checkpoints.load_published, path)
        is_same_config = state.config_hash == self.identity.config_hash
        is_known = latest is not None and (latest.step == self.step or bool(published))
        if latest is not None and latest.version == version and is_known and is_same_config:
            await self.channel.restore(latest, published or await self.lane.run(self.policy.state))
            self._hold(latest)
        else:  # the settings changed, and with them what is published
            await self._publish()

    def _restore(
        self, state: TrainState, weights: dict[str, Any], optimiser: dict[str, Any], critic: dict[str, Any]
    ) -> None:
        self.policy.load(weights)
        self._optimiser.load(optimiser)
        if self.critic is not None:
            self.critic.load(critic)
        torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state.rng), dtype=torch.uint8))
        self.step = self._saved_step = state.step
        self.line = list(state.line)
        self._untrainable = state.untrainable
        self._updater.bricks = _with_defaults(state.bricks, self._updater.bricks)
        self._updater.updates, self._updater.bad_updates = state.updates, state.bad_updates

    async def _reset_store(self, consumed: Sequence[tuple[str, int]], *, version: int, checkpoint: str) -> None:
        await self.buffer.resume_at(
            step=self.step,
            version=version,
            consumed=consumed,
            checkpoint=checkpoint,
            strict=self.max_staleness == 0,
        )


def _with_defaults(saved: Mapping[str, Any], initial: Mapping[str, Any]) -> dict[str, Any]:
    """The saved state of each brick, with its initial value for what it did not keep when it was saved."""
    return {
        name: {**start, **saved[name]} if isinstance(start, dict) and isinstance(saved.get(name), dict) else start
        for name, start in initial.items()
    }
