"""One process of a run, from opening the buffer to the exported model."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triune.buffer import StoredBuffer, open_buffer
from triune.config import config_hash
from triune.errors import FencedError, RunFailed, StoreError
from triune.launcher.alone import watch_explorers
from triune.launcher.beside import check_same_file, join_trainer, watch_trainer, while_watched
from triune.launcher.explorer_side import (
    ExplorerSide,
    build_explorer_side,
    build_pipeline,
    check_rows,
    feeds_itself,
    filled_buffers,
    is_stored,
    load_tokenizer,
    with_engine_dtype,
)
from triune.launcher.lane import ThreadLane
from triune.launcher.measure import measure_checkpoints
from triune.launcher.request import Request
from triune.launcher.roles import run_roles
from triune.launcher.tasks import Tasks, check_workflows, open_tasks
from triune.launcher.trainer_side import TrainerSide, build_trainer_side, find_checkpoints
from triune.models import export_model, resolve_model, set_threads
from triune.monitor import RunMonitor
from triune.ports import WeightChannel, WeightUpdate
from triune.records import Group

if TYPE_CHECKING:
    from triune.models import ChatTokenizer
    from triune.trainer import Trainer

STEER_S = 0.5
"""How often the control table is read."""


class Session:
    """Builds the parts this process was asked for, runs them beside each other, and closes them.

    Args:
        request: What to run.
        folder: The run's folder, locked.
        monitor: Not yet started.
    """

    def __init__(self, request: Request, folder: Path, monitor: RunMonitor) -> None:
        self.request, self.config, self.folder, self.monitor = request, request.config, folder, monitor
        self.lane = ThreadLane()
        self.buffer: StoredBuffer | None = None
        self.trainer: TrainerSide | None = None
        self.explorer: ExplorerSide | None = None
        self.tokenizer: ChatTokenizer | None = None
        self.tasks: Tasks | None = None

    @property
    def trains(self) -> bool:
        """Whether this process trains."""
        return "trainer" in self.request.roles

    @property
    def explores(self) -> bool:
        """Whether this process makes experience, or says that it is there; a trainer that samples nothing does it."""
        return "explorer" in self.request.roles or feeds_itself(self.config)

    def stop(self, reason: str) -> bool:
        """Ask for an orderly end at the next step boundary; False when nothing here can."""
        if self.trainer is None:
            return False
        self.trainer.loop.stop(reason)
        return True

    async def run(self) -> str:
        """Build, run to the end, and return why it ended.

        Raises:
            RunFailed: A role failed.
        """
        config = self.config
        await self.lane.run(set_threads, 1.0 if len(self.request.roles) > 1 else 0.5)
        self.tasks = open_tasks(config, workflow=self.request.workflow, reward=self.request.reward)
        if not feeds_itself(config):
            check_workflows(self.tasks)
        self.tokenizer = load_tokenizer(config, resolve_model(config.model.path).location)
        if feeds_itself(config) and not is_stored(config):
            check_rows(config, self.tasks, self.tokenizer)
        if not self.trains:
            return await self._run_beside()
        buffer = self.buffer = self._open_store()
        compared = "" if self.request.allow_changes else config_hash(config)
        epoch = await buffer.open_run(config.name, config_hash=compared, data_hash=self.tasks.data_hash)
        self.trainer = await build_trainer_side(
            config,
            tasks=self.tasks,
            buffer=buffer,
            lane=self.lane,
            monitor=self.monitor,
            folder=self.folder,
            epoch=epoch,
            allow_changes=self.request.allow_changes,
        )
        self.monitor.start(resumed_step=self._resumed_step(epoch))
        await self.trainer.loop.begin()
        if self.explores:
            first = await self._first_version(buffer)
            assert first is not None, "it was just published"
            self._build_explorer(buffer, first, self.trainer.channel)
        await self._run_roles(buffer)
        return self.trainer.loop.exit_reason

    async def _run_beside(self) -> str:
        """Explore beside a trainer, and beside the next one when it was resumed or begun again."""
        self.monitor.start()
        while True:
            buffer = self.buffer = await join_trainer(self._open_store, self.config.name, self.monitor)
            if buffer is None:
                return "the run is finished"
            try:
                if (self.folder / "run.resolved.json").exists():  # it is not where the folder is on another machine
                    check_same_file(self.config, self.folder)
                first = await while_watched(self._first_version(buffer), buffer, self.monitor, self.folder)
                if first is None:
                    return "the trainer had finished"
                channel = self.config.sync.channel(
                    ledger=buffer, lane=self.lane, folder=self.folder / "weights", epoch=buffer.epoch
                )
                self._build_explorer(buffer, first, channel)
                await self._run_roles(buffer, beside=watch_trainer(buffer, self.monitor, self.folder))
                return "the trainer has finished"
            except (FencedError, RunFailed) as error:
                if not isinstance(error, FencedError) and not isinstance(error.__cause__, FencedError):
                    raise
            await self._leave()
            self.monitor.reopen()
            self.monitor.note("another trainer has taken over: joining it; what was running is made again")

    def _build_explorer(self, buffer: StoredBuffer, first: WeightUpdate, channel: WeightChannel) -> None:
        assert self.tasks is not None
        assert self.tokenizer is not None
        self.tasks.stream.seek(None)
        self.explorer = build_explorer_side(
            with_engine_dtype(self.config, first.dtype),
            tasks=self.tasks,
            tokenizer=self.tokenizer,
            buffer=buffer,
            channel=channel,
            lane=self.lane,
            monitor=self.monitor,
            folder=self.folder,
            start_step=first.step,
        )

    async def results(self) -> dict[str, Any]:
        """What a finished run leaves behind: the exported model and late evaluations, for the summary."""
        if self.trainer is None or self.tokenizer is None:
            return {}
        target = self.folder / "export"
        policy, tokenizer = self.trainer.policy, self.tokenizer
        await self.lane.run(
            lambda: export_model(policy.model, target, tokenizer=tokenizer.hf, source_name=self.config.model.path)
        )
        if self.config.eval.every and self.config.eval.during == "checkpoint":
            assert self.tasks is not None
            await measure_checkpoints(self.config, self.folder, self.tasks, self.tokenizer, self.lane, self.monitor)
        return {"export": str(target)}

    async def close(self) -> None:
        """End everything that was built."""
        await self._leave()
        await asyncio.to_thread(self.lane.close)
        gc.unfreeze()

    async def _leave(self) -> None:
        """End what explores, and close the store."""
        if self.explorer is not None:
            await self.explorer.close()
            self.explorer = None
        if self.buffer is not None:
            await self.buffer.close()
            self.buffer = None

    # ------------------------------------------------------------------------------------------------ building

    def _reshape(self) -> Any:
        apply = build_pipeline(self.config).apply

        def reshape(group: Group) -> Group | None:
            return apply(group).group

        return reshape

    def _open_store(self) -> StoredBuffer:
        config = self.config
        return open_buffer(
            config.buffer,
            self.folder,
            reshape=self._reshape(),
            deterministic=config.deterministic,
            filled=filled_buffers(config),
            min_group=config.explorer.min_group,
        )

    def _resumed_step(self, epoch: int) -> int | None:
        """Step of the checkpoint the run goes on from; 0 when it ended before it had one, None when it is new."""
        steps = find_checkpoints(self.config, self.folder).steps()
        return steps[-1] if steps else 0 if epoch else None

    async def _first_version(self, buffer: StoredBuffer) -> WeightUpdate | None:
        with self.monitor.waiting("explorer", "the trainer's first version"):
            return await buffer.wait_version(-1)

    # ------------------------------------------------------------------------------------------------- running

    async def _run_roles(self, buffer: StoredBuffer, beside: Coroutine[Any, Any, None] | None = None) -> None:
        gc.collect()
        gc.freeze()  # a full collection would walk every module of torch about every 30 steps
        roles: dict[str, Coroutine[Any, Any, None]] = {} if beside is None else {"the trainer's process": beside}
        if self.explorer is not None:
            roles["explorer"] = self.explorer.loop.run()
            if self.explorer.answers is not None:
                roles["expert answers"] = self.explorer.answers.run()
            if self.explorer.follower is not None:
                roles["evaluation"] = self.explorer.follower
        if self.trainer is not None:
            roles["trainer"] = self.trainer.loop.run()
            if self.explorer is None:
                roles["watch for explorers"] = watch_explorers(buffer, self.config.name, self.monitor)
        steering = asyncio.create_task(self._steer(buffer), name="steering")
        try:
            await run_roles(roles)
            if self.explorer is not None and self.explorer.evaluation is not None:
                await self.explorer.evaluation.finish()
        finally:
            steering.cancel()
            await asyncio.gather(steering, return_exceptions=True)

    async def _steer(self, buffer: StoredBuffer) -> None:
        """Carry out what people ask for through the store's control table; only the trainer's process answers.

        A store that fails is asked again; what was carried out but not acknowledged is carried out again.
        """
        is_told = False
        while self.trainer is not None:
            try:
                for row in await buffer.control():
                    outcome = _carry_out(self.trainer.loop, row["action"], row["by"])
                    await buffer.ack_control(row["id"], by="trainer", outcome=outcome)
                is_told = False
            except StoreError as error:  # whether it ends the run is for those to say who need the store
                if not is_told:
                    self.monitor.note(f"stop, pause and resume wait until the store answers: {error}")
                is_told = True
            await asyncio.sleep(STEER_S)


def _carry_out(loop: Trainer, action: str, by: str) -> str:
    """Do what somebody asked for at the next step boundary; the answer."""
    if action == "stop":
        loop.stop(f"stopped by {by}")
        return "stops after this step"
    if action == "pause":
        loop.pause(by)
        return "pauses after this step"
    if action == "resume":
        loop.go_on()
        return "goes on"
    return "refused: no setting may change while a run lives; stop it and resume it with other ones"
