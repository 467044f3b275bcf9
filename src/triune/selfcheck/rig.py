"""The parts of the user's run, built as a run builds them, and one small batch of real rollouts."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triune.algorithms.samplings.fifo import Fifo
from triune.buffer import StoredBuffer, open_buffer
from triune.buffer.stores.memory import Memory
from triune.config import RunConfig
from triune.config.consumption import wanted_unit
from triune.errors import TriuneError, WorkflowError
from triune.explorer import BoundWorkflow
from triune.launcher import ThreadLane
from triune.launcher.explorer_side import (
    ExplorerSide,
    build_engine,
    build_explorer_side,
    build_pipeline,
    is_imitation,
    is_stored,
    load_tokenizer,
    with_engine_dtype,
)
from triune.launcher.tasks import Tasks, check_workflows, open_tasks, workflow_finder
from triune.launcher.trainer_side import TrainerSide, build_trainer_side
from triune.models import resolve_model, set_float32_matmul, set_threads
from triune.ports import EntryState, Lease, WeightUpdate
from triune.records import Experience, Group, Pair, Task
from triune.selfcheck.probe import Trained
from triune.selfcheck.recorder import Call, Recorded
from triune.selfcheck.stand_ins import Given, Kept, Rows, copies
from triune.selfcheck.tolerance import Tolerance

if TYPE_CHECKING:
    from triune.models import ChatTokenizer
    from triune.ports import Engine
    from triune.trainer import Policy

GROUPS = 4
"""Groups that are sampled."""

FEWEST_ROLLOUTS = 8
"""Rollouts that are wanted all together, where groups are small."""

ENOUGH_S = 20.0
"""Sampling ends after so long, once there are two groups."""

LONGEST_S = 240.0
"""Sampling that has brought nothing after so long is given up."""

TRAINED_TOKENS = {True: 32768, False: 1024}
"""Tokens that a training step of the checks reads at most, for small and for other models."""

SMALL = 20_000_000
"""Parameters up to which a model counts as small."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One group that was made.

    Attributes:
        raw: As the explorer closed it.
        shaped: What the pipeline made of it; None when it is not trained on.
    """

    raw: Group
    shaped: Group | None


class Rig:
    """Builds what the checks look at, each part when it is first asked for.

    Args:
        config: The user's.
        folder: For everything that is written; removed afterwards.
        workflow: As in `triune.run`.
        reward: Likewise.
    """

    def __init__(self, config: RunConfig, folder: Path, *, workflow: Any = None, reward: Any = None) -> None:
        self.config, self.folder = small(config, workflow is not None or reward is not None), folder
        self.asked = config
        self._given = {"workflow": workflow, "reward": reward}
        self.lane, self.calls = ThreadLane("selfcheck"), list[Call]()
        self.is_imitation, self.is_stored = is_imitation(config.algorithm), is_stored(config)
        self.sampling_s = 0.0
        self.failures: list[str] = []
        self.tasks: Tasks
        self.tokenizer: ChatTokenizer
        self.side: TrainerSide
        self.first: WeightUpdate
        self._buffer: StoredBuffer | None = None
        self._explorer: ExplorerSide | None = None
        self._engine: Engine | None = None
        self._groups: list[Sampled] | None = None
        self.sampling_error: TriuneError | None = None
        self._trainable: list[Group] | None = None
        self._trained: dict[str, Trained] = {}
        self._num_folders = 0

    async def open(self) -> None:
        """Read the tasks, load the model, publish version 0.

        Raises:
            TriuneError: The run could not begin.
        """
        config = self.config
        await self.lane.run(set_threads, 1.0)
        self.tasks = open_tasks(config, **self._given)
        if not self.is_imitation:
            check_workflows(self.tasks)
        self.tokenizer = load_tokenizer(config, resolve_model(config.model.path).location)
        buffer = self._buffer = open_buffer(config.buffer, self.folder, deterministic=config.deterministic)
        await buffer.open_run(config.name, config_hash="", data_hash="")
        self.side = await self.build_trainer(buffer)
        await self.side.loop.begin()
        first = await buffer.latest_version()
        assert first is not None, "it was just published"
        self.first = first
        self.side.channel.pin(first.version)

    async def close(self) -> None:
        """End everything that was built."""
        if self._explorer is not None:
            await self._explorer.close()
        if self._engine is not None:
            await self._engine.close()
        if self._buffer is not None:
            await self._buffer.close()
        await asyncio.to_thread(self.lane.close)

    # ------------------------------------------------------------------------------------------------ the parts

    @property
    def policy(self) -> Policy:
        """The model in training, with its initial weights."""
        return self.side.policy

    @property
    def is_small(self) -> bool:
        """Whether the model costs so little that nothing has to be left out."""
        return self.policy.num_parameters <= SMALL

    @property
    def algorithm(self) -> Any:
        """The user's."""
        return self.config.algorithm

    @property
    def tolerance(self) -> Tolerance:
        """How far two ways of computing the same may differ here."""
        return Tolerance.of(self.policy, self.first.dtype, self.config.trainer.float32_matmul)

    @property
    def can_be_exact(self) -> bool:
        """Whether the run rounds its products, and its weights would do without."""
        return self.tolerance.is_reduced and not self.policy.has_rounded_masters

    @cached_property
    def find_workflow(self) -> Callable[[Task], BoundWorkflow]:
        """The bound workflow of a task."""
        return workflow_finder(self.tasks.bricks, portable=self.tasks.portable)

    async def engine(self) -> Engine:
        """The engine, serving version 0 when it was just built."""
        if self._explorer is None and not self.is_imitation:
            await self.groups()
        if self._explorer is not None and self._explorer.engines:
            return self._explorer.engines[0]
        if self._engine is None:
            self._engine = build_engine(self._served, self.tokenizer, self.lane)
            await self._engine.swap(self.first, await self.side.channel.fetch(self.first))
        return self._engine

    @property
    def _served(self) -> RunConfig:
        """The configuration with the dtype that the engine computes in."""
        return with_engine_dtype(self.config, self.first.dtype)

    async def build_trainer(
        self, buffer: Any, *, config: RunConfig | None = None, monitor: Any = None, folder: Path | None = None
    ) -> TrainerSide:
        """A trainer of its own, with the model as it is on disk."""
        return await build_trainer_side(
            config or self.config,
            tasks=self.tasks,
            buffer=buffer,
            lane=self.lane,
            monitor=monitor or Rows(),  # type: ignore[arg-type]  # a monitor that writes no files
            folder=folder or self.new_folder(),
            epoch=0,
            allow_changes=True,
        )

    def new_folder(self) -> Path:
        """A folder that nobody else writes to."""
        self._num_folders += 1
        made = self.folder / f"part-{self._num_folders}"
        made.mkdir()
        return made

    # ------------------------------------------------------------------------------------------------- sampling

    async def groups(self) -> list[Sampled]:
        """A few groups, made by the run's own explorer.

        Raises:
            TriuneError: None was made.
        """
        if self.sampling_error is not None:
            raise self.sampling_error
        if self._groups is None:
            began = time.perf_counter()
            try:
                self._groups = await self._sample()
            except TriuneError as error:
                self.sampling_error = error
                raise
            self.sampling_s = time.perf_counter() - began
        return self._groups

    async def _sample(self) -> list[Sampled]:
        assert self._buffer is not None, "open was called"
        if self.is_stored:
            raise WorkflowError("sampling", "the run trains on experience that is stored already", "tasks to sample")
        engine = Recorded(inner=self._served.explorer.engine, calls=self.calls)
        explorer = self._served.explorer.model_copy(update={"engine": engine})
        side = self._explorer = build_explorer_side(
            self._served.model_copy(update={"explorer": explorer}),
            tasks=self.tasks,
            tokenizer=self.tokenizer,
            buffer=self._buffer,
            channel=self.side.channel,
            lane=self.lane,
            monitor=Rows(),  # type: ignore[arg-type]  # a monitor that writes no files
            folder=self.folder,
            start_step=0,
        )
        running = asyncio.ensure_future(side.loop.run())
        try:
            await self._until_enough(self._buffer, running)
            await self._buffer.finish("enough for the checks")
            await running
        finally:
            running.cancel()
        groups = await self._read(self._buffer)
        if not groups:
            raise WorkflowError("sampling", f"no group ended within {LONGEST_S:.0f} s", "one at least")
        return groups

    async def _until_enough(self, buffer: StoredBuffer, running: asyncio.Future[None]) -> None:
        began, wanted = time.perf_counter(), self.config.trainer.entries_per_step
        while not running.done():
            entries = await buffer.browse(limit=1000)
            num_ready, seconds = sum(entry.state is EntryState.READY for entry in entries), time.perf_counter() - began
            if num_ready >= wanted or len(entries) >= 3 * wanted or (seconds > ENOUGH_S and len(entries) > 1):
                return
            if seconds > LONGEST_S:
                return
            await asyncio.wait({running}, timeout=0.01)

    async def _read(self, buffer: StoredBuffer) -> list[Sampled]:
        found = []
        for entry in reversed(await buffer.browse(limit=1000)):
            raw = await buffer.read(entry.entry, revision=0)
            self.failures += [f"{one['boundary']}: {one['error']}" for one in raw.info.get("failures", ())]
            shaped = await buffer.read(entry.entry) if entry.state is EntryState.READY else None
            found.append(Sampled(raw=raw, shaped=shaped))
        return found

    async def experiences(self) -> list[Experience]:
        """Every experience of the groups, as the explorer closed them."""
        return [row for sampled in await self.groups() for row in experiences_of(sampled.raw)]

    async def calls_of(self) -> dict[str, list[Call]]:
        """Calls of each rollout that is in the groups, in order."""
        kept = {str(row.id.rollout) for row in await self.experiences()}
        found: dict[str, list[Call]] = {}
        for call in self.calls:
            if call.rollout in kept:
                found.setdefault(call.rollout, []).append(call)
        return {name: sorted(calls, key=lambda call: call.turn) for name, calls in found.items()}

    # ------------------------------------------------------------------------------------------------- training

    async def trainable(self) -> list[Group]:
        """Shaped groups with something to learn in them, as many tokens as the checks can afford.

        Where every reward was the same, members get 0 and 1 in turn, and the run's pipeline shapes that.
        """
        if self._trainable is None:
            self._trainable = await self._find_trainable()
        return self._trainable

    async def _find_trainable(self) -> list[Group]:
        groups = await self.groups()
        shaped = [one.shaped for one in groups if one.shaped is not None]
        if not self.is_imitation and not any(is_mixed(group) for group in shaped):
            apply = build_pipeline(self.config).apply
            dealt = [apply(with_rewards(one.raw, lambda row: float(row.member % 2))).group for one in groups]
            shaped = [group for group in dealt if group is not None]
        return limited(shaped, TRAINED_TOKENS[self.is_small])

    async def few(self) -> list[Group]:
        """The part of `trainable` that exact products can afford."""
        return limited(await self.trainable(), TRAINED_TOKENS[self.is_small] // 2)

    async def trained(self, kind: str, **changes: Any) -> Trained:
        """One real step of the run's trainer on `trainable`, with its settings but for `changes`; made once per kind.

        Args:
            kind: `plain`, `cut` (micro-batches as small as they get) or `reversed` (the groups the other way round), or
                `whole`, which is `plain` without rounding.
            changes: Fields of `TrainerSettings`.
        """
        if kind not in self._trained:
            groups = await self.trainable()
            leases = leases_of(groups[::-1] if kind == "reversed" else groups)
            self._trained[kind] = await self._train(leases, changes)
        return self._trained[kind]

    async def _train(self, leases: Sequence[Lease], changes: Mapping[str, Any]) -> Trained:
        rows, kept = Rows(), Kept()
        config = self.config_of_step(len(leases), changes)
        side = await self.build_trainer(Given(leases), config=config, monitor=rows)
        side.loop.checkpoints = kept  # type: ignore[assignment]  # in memory
        before = await self.lane.run(lambda: copies(dict(side.policy.model.named_parameters())))
        await side.loop.run()
        set_float32_matmul(self.config.trainer.float32_matmul)  # of the whole process, and `changes` may name another
        return Trained(metrics=rows.step, kept=kept, side=side, before=before, config=config)

    def config_of_step(self, num_entries: int, changes: Mapping[str, Any]) -> RunConfig:
        """One step with one update: what a run does first."""
        asked, unit = self.asked, wanted_unit(self.config.algorithm)
        algorithm = self.config.algorithm
        if algorithm.recomputes_old(num_updates=asked.trainer.updates_per_step, max_staleness=asked.sync.max_staleness):
            algorithm = dataclasses.replace(algorithm, old_logprobs="always")
        if getattr(algorithm.critic, "warmup_steps", 0):  # a step of its warm-up would not touch the policy
            algorithm = dataclasses.replace(algorithm, critic=dataclasses.replace(algorithm.critic, warmup_steps=0))
        step = {"steps": 1, "epochs": 1, "mini_batches": 1, unit: num_entries, **changes}
        trainer = self.config.trainer.model_copy(update=step)
        return self.config.model_copy(update={"trainer": trainer, "algorithm": algorithm})


def small(config: RunConfig, is_inline: bool) -> RunConfig:
    """The user's run with a few groups, a store in memory, and nothing measured or written."""
    size = max(config.algorithm.group_size, 1)
    unit = wanted_unit(config.algorithm)
    num = max(GROUPS, -(-FEWEST_ROLLOUTS // size))
    explorer = config.explorer.model_copy(update={"runner": "inline"}) if is_inline else config.explorer
    return config.model_copy(
        update={
            "trainer": config.trainer.model_copy(update={"steps": 1, unit: num, "save_every": 0}),
            "buffer": config.buffer.model_copy(update={"store": Memory(), "segments": None}),
            "eval": config.eval.model_copy(update={"every": 0}),
            "sync": config.sync.model_copy(update={"every": 1}),
            "explorer": explorer,
            "algorithm": dataclasses.replace(config.algorithm, sampling=Fifo()),
        }
    )


def experiences_of(group: Group) -> list[Experience]:
    """Token sequences of a group: its experiences, or both halves of its pairs."""
    found: list[Experience] = []
    for record in group.records:
        if isinstance(record, Experience):
            found.append(record)
        elif isinstance(record, Pair):
            found += [record.chosen, record.rejected]
    return found


def is_mixed(group: Group) -> bool:
    """Whether rewards differ inside the group."""
    return len({row.reward for row in experiences_of(group) if row.is_valid}) > 1


def with_rewards(group: Group, reward: Callable[[Experience], float]) -> Group:
    """Copy whose rollouts are valid and have other rewards."""
    return group.map(lambda row: row.replace(reward=reward(row), is_valid=True))


def limited(groups: Sequence[Group], tokens: int) -> list[Group]:
    """The same groups with fewer records in each, so that all together hold about so many tokens."""
    total = sum(len(row) for group in groups for row in experiences_of(group))
    if total <= tokens or not groups:
        return list(groups)
    kept, share = [], tokens / len(groups)
    for group in groups:
        records, used = [], 0
        for record in group.records:
            size = sum(len(row) for row in experiences_of(group.with_records([record])))
            if len(records) > 1 and used + size > share:
                break
            records.append(record)
            used += size
        kept.append(group.with_records(records))
    return kept


def leases_of(groups: Sequence[Group]) -> list[Lease]:
    """Groups as a trainer gets them."""
    return [Lease(entry=str(group.id), revision=1, use_no=1, group=group) for group in groups]
