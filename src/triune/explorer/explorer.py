"""The explorer's loop: tasks in, groups of experience out, always with weights that are fresh enough."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

from triune.errors import EngineError, TriuneError, WorkflowError
from triune.explorer.scheduler import Scheduler
from triune.explorer.tally import Tally
from triune.pipelines import Shaped
from triune.ports import (
    AdmissionRule,
    Buffer,
    Engine,
    Evaluator,
    GroupOutcome,
    Monitor,
    Refund,
    TaskStream,
    WeightChannel,
    WeightUpdate,
)
from triune.records import Group, GroupId, Task

ROLE = "explorer"

MAX_SKIPPED = 10_000
"""Quarantined tasks in a row after which there is nothing left to do."""

RECHECK_S = 0.05
"""How often an explorer that has nothing to do asks whether a group is due again."""

log = logging.getLogger("triune.explorer")


class Explorer:
    """Makes experience until the tasks run out or the trainer wants no more.

    Args:
        tasks: What to do, in training order.
        buffer: Where groups go; issues the slots that bound how far exploring may run ahead.
        scheduler: Runs the rollouts.
        engine: Takes weights between two decode steps.
        channel: Where the weights of a version are fetched.
        apply: Shapes a group: `Pipeline.apply`.
        rule: The admission rule of the run (CONTRACTS C5).
        group_size: Rollouts per task.
        style: `drain` finishes running rollouts before weights are swapped, `inflight` swaps under them and ends
            groups that would be too old when they are trained on.
        max_stale_retries: How often such a group is tried again.
        monitor: Gets one row per version.
        evaluator: Measures versions before rollouts start with them; None = no evaluation.
        deterministic: Run in rounds: as many groups as there are slots, kept in order of admission. Needs the engine
            to be a `WaveGate`, style `drain` and `max_staleness` 0.
        give_up_after: Groups in a row without anything valid, or dropped by an operator that fails, after which the
            run ends; so many dropped in a row by operators that work are worth a warning.
        max_dropped: Groups in a row dropped by operators that work, after which the run ends too.
    """

    def __init__(
        self,
        *,
        tasks: TaskStream,
        buffer: Buffer,
        scheduler: Scheduler,
        engine: Engine,
        channel: WeightChannel,
        apply: Callable[[Group], Shaped],
        rule: AdmissionRule,
        group_size: int,
        monitor: Monitor,
        style: Literal["drain", "inflight"] = "drain",
        max_stale_retries: int = 2,
        evaluator: Evaluator | None = None,
        deterministic: bool = False,
        give_up_after: int = 64,
        max_dropped: int = 1024,
    ) -> None:
        self._tasks, self._buffer, self._scheduler = tasks, buffer, scheduler
        self._engine, self._channel, self._apply = engine, channel, apply
        self._rule, self._group_size, self._monitor = rule, group_size, monitor
        self._style, self._max_stale_retries = style, max_stale_retries
        self._evaluator, self._deterministic = evaluator, deterministic
        self._give_up_after, self._num_barren, self._num_dropped = give_up_after, 0, 0
        self._max_dropped = max_dropped
        self._served: WeightUpdate | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._may_start = asyncio.Event()
        self._has_no_tasks = False
        self._drawn: deque[tuple[Task, Any]] = deque()  # next tasks, not admitted yet
        self._cursor: Any = None  # of the last task that was admitted
        self._told: set[str] = set()
        self._tally = Tally()

    async def run(self) -> None:
        """Make experience.

        consumes: Task                 waits for: a slot, then newer weights where there are any
        produces: one group per task   unblocked by: the trainer's publish

        Raises:
            TriuneError: The first error of any of its parts; a failed rollout is none.
        """
        try:
            async with asyncio.TaskGroup() as children:
                await self._explore(children)
        except BaseExceptionGroup as errors:
            error = _first(errors)
            raise error from error.__cause__
        finally:
            self._log()

    async def _explore(self, children: asyncio.TaskGroup) -> None:
        first = await self._wait_for_version(-1)
        if first is None:
            return
        await self._serve(first)
        self._may_start.set()
        follower = children.create_task(self._follow()) if self._style == "inflight" else None
        self._scheduler.remember(await self._buffer.failures(), tries_again=not self._deterministic)
        await self._redispatch(children)
        if self._deterministic:
            await self._explore_in_rounds()
        else:
            while admitted := await self._next():
                await self._catch_up()
                for group, task in admitted:
                    self._start(children, group, task)
        await self._end(children, follower)

    # --------------------------------------------------------------------------------------------------- tasks

    async def _redispatch(self, children: asyncio.TaskGroup) -> None:
        """Go on where an earlier incarnation stopped: its open groups first, then the cursor of its last admission."""
        for group in await self._buffer.open_admissions():
            task = self._tasks.find(group.taskset, group.task_key)
            if task is None:
                log.warning("open group %s: its task is no longer in the task set; its slot is given back", group)
                await self._buffer.refund(group, Refund.LOST)
            elif self._deterministic:
                await self._make(group, task)
            else:
                await self._scheduler.room()
                self._start(children, group, task)
        await self._seek()

    async def _seek(self) -> bool:
        """Go to the cursor of the newest admission, another explorer's too; whether that is elsewhere."""
        cursor = await self._buffer.cursor()
        if cursor is None or cursor == self._cursor:
            return False
        self._tasks.seek(cursor)
        self._cursor = cursor
        self._drawn.clear()
        return True

    async def _next(self) -> list[tuple[GroupId, Task]]:
        """The next admitted groups: one that is due again, else as many new ones as have slots; none when it is over.

        What is admitted together is decoded together.
        """
        if not self._deterministic and not self._scheduler.has_room:
            with self._waiting("a free lane"):
                await self._scheduler.room()
        while True:
            again = await self._readmit()
            if again is not None:
                return [again]
            num = self._draw(max(1, self._scheduler.num_free // self._group_size))
            if num == 0 and not await self._seek():
                self._has_no_tasks = True
                return []
            with self._waiting("a slot, which the trainer's next version brings"):
                tasks = tuple(self._drawn)[:num]
                groups = await self._buffer.admit_next(tasks, self._rule, after=self._cursor) if num else []
            if groups is None:
                return []
            if groups:
                taken = [self._drawn.popleft() for _ in groups]
                self._cursor = taken[-1][1]
                return [(group, task) for group, (task, _) in zip(groups, taken, strict=True)]
            await self._seek()

    def _draw(self, num: int) -> int:
        """Have up to `num` tasks at hand that may be tried; the number of them."""
        waiting, self._drawn, num_skipped = self._drawn, deque(), 0
        while len(self._drawn) < num and (entry := waiting.popleft() if waiting else self._tasks.next()) is not None:
            if self._scheduler.is_quarantined(entry[0]):
                self._tally.add({"quarantined": 1.0})
                num_skipped += 1
                if num_skipped >= MAX_SKIPPED:  # an endless stream would never be at its end
                    raise WorkflowError(
                        "tasks",
                        f"{num_skipped} in a row are set aside because their rollouts failed again and again",
                        "tasks whose rollouts end with a reward",
                        "mend the workflow or reward; the warnings before this line say what failed",
                    )
            else:
                self._drawn.append(entry)
        self._drawn.extend(waiting)
        return max(0, min(num, len(self._drawn)))

    async def _readmit(self) -> tuple[GroupId, Task] | None:
        group = await self._buffer.readmit(self._rule, max_retries=self._max_stale_retries)
        if group is None:
            return None
        task = self._tasks.find(group.taskset, group.task_key)
        assert task is not None, "a group of this run has its task"
        return group, task

    # ------------------------------------------------------------------------------------------------ versions

    async def _wait_for_version(self, newer_than: int) -> WeightUpdate | None:
        with self._waiting(f"version {newer_than + 1} of the weights"):
            return await self._buffer.wait_version(newer_than)

    async def _catch_up(self) -> None:
        """Before a rollout starts: serve the newest version (drain), or wait until the follower has (inflight)."""
        if self._style == "inflight":
            with self._waiting("the evaluation"):
                await self._may_start.wait()
            return
        assert self._served is not None
        newest = await self._buffer.latest_version()
        if newest is None or newest.version <= self._served.version:
            return
        await self._drain("running rollouts, to take newer weights")
        newest = await self._buffer.latest_version() or newest
        await self._serve(newest)

    async def _follow(self) -> None:
        """Swap under running rollouts as soon as a version is published, and end those that grew too old."""
        assert self._served is not None
        while True:
            update = await self._buffer.wait_version(self._served.version)
            if update is None:
                return
            aborted = self._scheduler.abort_older_than(await self._buffer.floor_version(self._rule.max_staleness))
            self._tally.add({"aborted_groups": float(aborted)})
            await self._serve(update)

    async def _serve(self, update: WeightUpdate) -> None:
        """Bring a version to the engine, and measure it when that is due, before any rollout starts with it."""
        self._log()
        with self._monitor.timed(f"{ROLE}/swap"):
            update, tensors = await self._fetch(update)
            await self._engine.swap(update, tensors)
        self._served = update
        if self._evaluator is not None and self._evaluator.is_due(update.step):
            self._may_start.clear()
            with self._monitor.timed(f"{ROLE}/evaluate"):
                await self._evaluator.evaluate(update)
            self._may_start.set()
        self._channel.release(update.version)

    async def _fetch(self, update: WeightUpdate) -> tuple[WeightUpdate, Mapping[str, Any]]:
        """The tensors of a version, or of a newer one that was published while this one was looked up."""
        while True:
            try:
                return update, await self._channel.fetch(update)
            except EngineError:
                newest = await self._buffer.latest_version()
                if newest is None or newest.version <= update.version:
                    raise
                update = newest

    # -------------------------------------------------------------------------------------------------- groups

    def _start(self, children: asyncio.TaskGroup, group: GroupId, task: Task) -> None:
        child = children.create_task(self._make(group, task))
        self._running.add(child)
        child.add_done_callback(self._running.discard)

    async def _make(self, group: GroupId, task: Task) -> None:
        await self._keep(group, await self._roll(group, task))

    async def _roll(self, group: GroupId, task: Task) -> GroupOutcome:
        self._tally.begin()
        try:
            return await self._scheduler.run(group, task, num=self._group_size)
        finally:
            self._tally.end()

    async def _keep(self, group: GroupId, outcome: GroupOutcome) -> None:
        """Shape and store a group, or give its slot back and keep what there is of it for people to look at."""
        self._report(group, outcome)
        self._tally.add_outcome(outcome)
        if outcome.refund is not None:
            if outcome.group is None:
                await self._buffer.refund(group, outcome.refund)
            else:
                await self._buffer.put(outcome.group, refund=outcome.refund)
            if outcome.refund is not Refund.STALE:
                self._count_barren(group, outcome.failures[-1]["error"] if outcome.failures else "no valid reward")
            return
        assert outcome.group is not None
        if outcome.group.is_waiting:  # shaped when its last reward is there
            await self._buffer.put(outcome.group)
            self._num_barren = 0
            return
        with self._monitor.timed(f"{ROLE}/pipeline"):
            shaped: Any = self._apply(outcome.group)
            if inspect.isawaitable(shaped):
                shaped = await shaped
        self._tally.add(shaped.metrics)
        if shaped.error:
            self._tell(f"pipeline: {shaped.error}")
        await self._buffer.put(outcome.group, shaped.group, dropped_by=shaped.dropped_by)
        if shaped.dropped_by and shaped.error:
            self._count_barren(group, shaped.error)
        else:
            self._num_barren = 0
            self._count_dropped(group, shaped.dropped_by)

    def _report(self, group: GroupId, outcome: GroupOutcome) -> None:
        """Say what failed, each thing once."""
        for failure in outcome.failures:
            self._tell(f"{failure['boundary']}: {failure['error']}")
            if self._deterministic and failure["boundary"] == "timeout":
                self._tell("this run cannot be repeated bit by bit: the clock ended a rollout (rollout_timeout_s)")
        if outcome.refund is Refund.QUARANTINED:
            log.warning("task %s/%s failed too often and is set aside", group.taskset, group.task_key)

    def _count_barren(self, group: GroupId, why: str) -> None:
        """End the run when nothing valid comes any more: the trainer would wait for ever."""
        self._num_barren += 1
        if self._num_barren >= self._give_up_after:
            raise WorkflowError(
                str(group),
                f"{self._num_barren} groups in a row brought too few valid rollouts; the last: {why}",
                "rollouts that end with a reward",
                "mend the workflow, reward or operator, or lower explorer.min_group",
            )

    def _count_dropped(self, group: GroupId, by: str) -> None:
        """Say when an operator that works lets nothing through, and end the run when it never does."""
        self._num_dropped = self._num_dropped + 1 if by else 0
        if self._num_dropped >= self._max_dropped:
            raise WorkflowError(
                str(group),
                f"{self._num_dropped} groups in a row were dropped, the last by {by}: nothing is left to train on",
                "groups that pass the pipeline, now and then",
                "train on tasks that are solved sometimes, or with a larger algorithm.group_size; "
                "explorer.max_dropped says how long to go on",
            )
        if self._num_dropped and self._num_dropped % self._give_up_after == 0:
            log.warning("%d groups in a row were dropped, the last by %s: nothing to train on", self._num_dropped, by)

    def _tell(self, text: str) -> None:
        if len(self._told) < 20 and text not in self._told:
            self._told.add(text)
            log.warning("%s", text)

    # -------------------------------------------------------------------------------------------- deterministic

    async def _explore_in_rounds(self) -> None:
        """Admit what the slots allow, run it as one set of waves, keep it in order; the clock decides nothing."""
        gate: Any = self._engine
        while admitted := await self._next():
            while await self._num_slots() and (more := await self._next()):
                admitted += more
            await self._catch_up()
            gate.hold()
            rolls = [(group, asyncio.ensure_future(self._roll(group, task))) for group, task in admitted]
            await asyncio.sleep(0)
            gate.release()
            await asyncio.gather(*(roll for _, roll in rolls))
            for group, roll in rolls:
                await self._keep(group, roll.result())

    async def _num_slots(self) -> int:
        """Groups that may be admitted now without waiting; counted, because waiting would be a matter of time."""
        return await self._buffer.free_slots(self._rule)

    # -------------------------------------------------------------------------------------------------- the end

    async def _drain(self, for_what: str) -> None:
        with self._waiting(for_what):
            while self._running:
                await asyncio.wait(self._running)

    async def _end(self, children: asyncio.TaskGroup, follower: asyncio.Task[None] | None) -> None:
        """Hand over what is left, then stay until the trainer is done: it may need a group again, or a measurement."""
        if self._has_no_tasks:
            await self._drain("the last rollouts")
            await self._buffer.end("the tasks ran out")
        with self._waiting("the trainer's last step"):
            await (self._outlive(children) if follower is None else self._outlive_beside(children, follower))
        for child in tuple(self._running):
            child.cancel()

    async def _outlive(self, children: asyncio.TaskGroup) -> None:
        """Measure versions that are due, and make again what came to nothing elsewhere, until the trainer is done."""
        assert self._served is not None
        news = asyncio.ensure_future(self._buffer.wait_version(self._served.version))
        try:
            while True:
                more = await self._more()
                if more:
                    await self._catch_up()
                    for group, task in more:
                        self._start(children, group, task)
                elif (await asyncio.wait({news}, timeout=RECHECK_S))[0]:
                    update = news.result()
                    if update is None:
                        return
                    self._log()  # under the step that its rollouts were made for
                    if self._evaluator is not None and self._evaluator.is_due(update.step):
                        await self._drain("running rollouts, to take newer weights")
                        await self._serve(update)
                    news = asyncio.ensure_future(self._buffer.wait_version(update.version))
        finally:
            news.cancel()

    async def _outlive_beside(self, children: asyncio.TaskGroup, follower: asyncio.Task[None]) -> None:
        """Make again what became too old, until the follower hears that the trainer is done."""
        while not follower.done():
            for group, task in (more := await self._more()):
                self._start(children, group, task)
            if not more:
                await asyncio.wait({follower}, timeout=RECHECK_S)

    async def _more(self) -> list[tuple[GroupId, Task]]:
        """What the trainer misses after the last admission: a group to make again, or one for a slot given back late.

        An entry whose reward never came, or that an amendment dropped, gives its slot back long after its put.
        """
        again = await self._readmit()
        if again is not None:
            return [again]
        if self._has_no_tasks or not await self._buffer.free_slots(self._rule):
            return []
        return await self._next()

    # -------------------------------------------------------------------------------------------------- metrics

    def _waiting(self, for_what: str) -> AbstractContextManager[None]:
        return self._monitor.waiting(ROLE, for_what)

    def _log(self) -> None:
        """One row for what ended since the last one, at the step it is made for."""
        row: Mapping[str, float] = self._tally.take()
        if row and self._served is not None:
            self._monitor.log(row, role=ROLE, step=self._served.step + 1)


def _first(errors: BaseExceptionGroup) -> BaseException:
    """The error that ended the run; one of ours before what followed from it."""
    flat: list[BaseException] = []
    for error in errors.exceptions:
        flat.append(_first(error) if isinstance(error, BaseExceptionGroup) else error)
    return next((error for error in flat if isinstance(error, TriuneError)), flat[0])
