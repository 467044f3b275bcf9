"""Runs the rollouts of groups: concurrency, deadlines, new attempts, partial groups, quarantine.

Our own workflows run as one asyncio task per rollout beside the engine; other code runs in runner processes that can
be killed. A failed rollout is data: it is recorded as invalid with the boundary it crossed, and never ends a run.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

import msgspec

from triune.errors import ConfigError, RolloutError
from triune.explorer.assemble import Finished
from triune.explorer.binding import BoundWorkflow
from triune.explorer.config import ExplorerSettings
from triune.explorer.faults import Failure, classify
from triune.explorer.group_run import GroupRun, Rollout
from triune.explorer.model import Model
from triune.explorer.results import check_asked, drop_odd_values, read_result
from triune.explorer.score import GroupScores, session_score
from triune.explorer.seeds import group_seed
from triune.explorer.session import Session, Shared
from triune.explorer.threads import run_in_thread
from triune.explorer.watchdog import Watchdog
from triune.models import ChatTokenizer
from triune.ports import Engine, GroupOutcome, Refund, Sampling
from triune.records import GroupId, Stop, Task

_FREE_RETRIES = 3
"""Attempts on top for a rollout whose runner process was lost: mostly another rollout's fault."""


class Runners(Protocol):
    """Processes for code that may hang (`triune.explorer.runners`)."""

    async def run(
        self,
        bound: BoundWorkflow,
        task: Task,
        session: Session,
        score: Callable[..., Any] | None,
        started: Callable[[], None],
    ) -> Any:
        """Run one rollout elsewhere; cancelling kills it after the grace period. Raises what the workflow raised.

        `started` is called when a process takes it: time spent waiting for one is not the rollout's.
        """
        ...

    async def close(self) -> None: ...


class Scheduler:
    """Implements the port `Rollouts`.

    Args:
        engine: What samples tokens; a `WaveGate` in deterministic runs.
        tokenizer: Chat template and stop tokens of the model.
        workflows: The bound workflow of a task; called once per group, so it should remember what it built.
        settings: The section `explorer`.
        seed: Of the run.
        runners: Processes for user code; None = everything runs inline.
        greedy_member: Whether a training group's last member answers greedily: a baseline that no sample influenced.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        tokenizer: ChatTokenizer,
        workflows: Callable[[Task], BoundWorkflow],
        settings: ExplorerSettings,
        seed: int = 0,
        runners: Runners | None = None,
        greedy_member: bool = False,
    ) -> None:
        self._greedy_member = greedy_member
        self._engine, self._tokenizer, self._workflows = engine, tokenizer, workflows
        self._settings, self._seed, self._runners = settings, seed, runners
        self._gate: Any = engine if hasattr(engine, "enter") else None
        self._sampling = self._with_stops(settings.sampling())
        self._free = settings.max_rollouts
        self._queue: deque[tuple[GroupRun, int]] = deque()
        self._runs: dict[GroupId, GroupRun] = {}
        self._room: deque[asyncio.Future[None]] = deque()
        self._failed: dict[tuple[str, str], int] = {}
        self._watchdog = Watchdog()

    # ------------------------------------------------------------------------------------------------- port

    async def run(
        self, group: GroupId, task: Task, *, num: int, sampling: Sampling | None = None, training: bool = True
    ) -> GroupOutcome:
        """Run `num` rollouts of a task; see the port `Rollouts`.

        Returns:
            Its `refund` says why the group cannot be trained on: fewer than `min_group` valid members (`too_small`,
            `invalid`), overtaken by weights (`stale`), or a task that failed too often (`quarantined`).
        """
        loop = asyncio.get_running_loop()
        bound, name = self._workflows(task), str(group)
        if not bound.is_ours:
            self._check_place(bound)
        shared = Shared(
            engine=self._engine,
            tokenizer=self._tokenizer,
            sampling=self._sampling if sampling is None else self._with_stops(sampling),
            seed=group_seed(self._seed, group),
            prefix=name,
            max_context=self._engine.max_context,
            merge_turns=self._settings.merge_turns,
        )
        run = GroupRun(group, task, num, bound, shared, name, loop.create_future())
        run.training = training
        if training and self._greedy_member:
            run.greedy = msgspec.structs.replace(
                shared, sampling=msgspec.structs.replace(shared.sampling, temperature=0.0)
            )
        if bound.scorer is not None and bound.scorer.per_group:
            if num > self._settings.max_rollouts:
                raise ConfigError(
                    "explorer.max_rollouts",
                    f"{self._settings.max_rollouts} lanes for groups of {num} that are scored together",
                    f"at least {num}",
                )
            if self._goes_away(bound) and not bound.is_async and num > self._settings.runners:
                raise ConfigError(
                    "explorer.runners",
                    f"{self._settings.runners} processes for groups of {num} that are scored together, and workflow "
                    f"{bound.name} takes one for each rollout",
                    f"at least {num}",
                    "make it an async function: many of those share a process",
                )
            run.scores = GroupScores(bound.scorer, task, run, self._gate, lambda: self._go_on(run))
        self._runs[group] = run
        try:
            now = loop.time()
            for member in range(num):
                if self._free:
                    self._free -= 1
                    self._start(run, member, now)
                else:
                    self._queue.append((run, member))
            await run.done
        finally:
            del self._runs[group]
            self._clear(run)
        return self._close(run)

    # ---------------------------------------------------------------------------------------- for the explorer

    @property
    def has_room(self) -> bool:
        """Whether a rollout could start at once."""
        return self._free > 0

    @property
    def num_free(self) -> int:
        """Rollouts that could start at once."""
        return self._free

    async def room(self) -> None:
        """Wait until a rollout could start at once."""
        while not self._free:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._room.append(waiter)
            await waiter

    def is_quarantined(self, task: Task) -> bool:
        """Whether the task failed so often in a row that it is not tried again."""
        return self._failed.get((task.taskset, task.key), 0) >= self._settings.quarantine_after

    def remember(self, failures: Mapping[tuple[str, str], int], *, tries_again: bool) -> None:
        """Take over what an earlier incarnation learnt: (task set, task key) → groups in a row that failed.

        `tries_again`: a task that was set aside gets one more group, as what made it fail may have been mended.
        """
        most = self._settings.quarantine_after - tries_again
        self._failed.update((task, min(number, most)) for task, number in failures.items())

    def abort_older_than(self, version: int) -> int:
        """End training groups that began to sample with older weights, as stale; the number of them."""
        stale = [run for run in self._runs.values() if run.training and -1 < run.shared.oldest_version < version]
        for run in stale:
            run.refund = Refund.STALE
            if not run.done.done():
                run.done.set_result(None)
        return len(stale)

    @property
    def num_running(self) -> int:
        """Rollouts that hold a lane."""
        return self._settings.max_rollouts - self._free

    async def close(self) -> None:
        """End everything that runs, and the runner processes."""
        for run in list(self._runs.values()):
            self._clear(run)
            if not run.done.done():
                run.done.cancel()
        self._watchdog.stop()
        if self._runners is not None:
            await self._runners.close()

    # ----------------------------------------------------------------------------------------------- rollouts

    def _start(self, run: GroupRun, member: int, now: float) -> None:
        """Give a member its lane and its clock."""
        goes_away = self._goes_away(run.bound)
        deadline = math.inf if goes_away else now + self._settings.rollout_timeout_s
        rollout = Rollout(run, member, now, deadline)
        run.live[member] = rollout
        loop = asyncio.get_running_loop()
        if self._gate is not None:
            self._gate.enter(rollout.session.name)
        if not goes_away:
            self._ring_at(run, deadline)
        rollout.task = loop.create_task(self._play(rollout))

    async def _play(self, rollout: Rollout) -> None:
        """Run one attempt; the boundary where whatever user code raises becomes data."""
        session = rollout.session
        try:
            value, failure = await self._call(rollout), None
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # sys.exit() ends a rollout, not the run
            value, failure = None, classify(error)
        if not rollout.is_over and session is rollout.session:
            self._ended(rollout, value, failure)

    def _call(self, rollout: Rollout) -> Coroutine[Any, Any, Any]:
        """The workflow as a coroutine: inline, in a thread, or in a runner process."""
        run, session = rollout.run, rollout.session
        bound = run.bound
        score = session_score(bound, run.task, session, run.scores) if bound.sees_session else None
        if self._runners is not None and self._goes_away(bound):
            return self._runners.run(bound, run.task, session, score, lambda: self._start_clock(rollout))
        if bound.is_async:
            return bound.call(run.task, Model(session), score)
        return run_in_thread(bound, run.task, Model(session), score, session.name)

    def _ended(self, rollout: Rollout, value: Any, failure: Failure | None) -> None:
        """An attempt is over: keep it, or start the next one with the same lane and deadline."""
        run, session, now = rollout.run, rollout.session, asyncio.get_running_loop().time()
        finished = Finished(session=session, seconds=now - rollout.started)
        session.close()
        try:
            drop_odd_values(session)
            if failure is None:
                read_result(value, finished, run.task, session.name)
                check_asked(finished, session.name)
        except RolloutError as error:
            failure = failure or classify(error)
        if rollout.is_timed_out:
            limit = self._settings.rollout_timeout_s
            failure = Failure(boundary="timeout", stop=Stop.TIMEOUT, error=f"no result after {limit} s", retry=False)
        if failure is not None:
            run.note_failure(rollout, failure)
            retries = self._settings.retries + (_FREE_RETRIES if failure.boundary == "runner" else 0)
            is_final = not failure.retry or (run.scores is not None and run.scores.has_scored(rollout.member))
            if not is_final and rollout.attempt < retries and now < rollout.deadline:
                self._try_again(rollout)
                return
            finished.reward = None
            finished.stop = failure.stop if failure.boundary != "reward" else None
            finished.info = {"failed": failure.boundary, "error": failure.error}
        rollout.is_over = True
        if run.scores is not None:
            run.scores.left(rollout.member)
        self._hand_over(session.name)
        run.finish(rollout.member, finished)

    def _try_again(self, rollout: Rollout) -> None:
        old = rollout.session.name
        rollout.attempt += 1
        rollout.waits_since = None
        rollout.session = rollout.new_session()
        if self._gate is not None:
            self._gate.enter(rollout.session.name)
            self._gate.leave(old)
        if rollout.run.scores is not None:
            rollout.run.scores.left(rollout.member, again=True)
        rollout.task = asyncio.get_running_loop().create_task(self._play(rollout))

    def _hand_over(self, name: str) -> None:
        """Pass a lane to the next member that waits, before its last owner leaves the wave."""
        if self._queue:
            run, member = self._queue.popleft()
            self._start(run, member, asyncio.get_running_loop().time())
        else:
            self._free += 1
            while self._room and self._free:
                waiter = self._room.popleft()
                if not waiter.done():
                    waiter.set_result(None)
                    break
        if self._gate is not None:
            self._gate.leave(name)

    # ----------------------------------------------------------------------------------------------- deadlines

    def _start_clock(self, rollout: Rollout) -> None:
        """A runner took the rollout; its time counts from now on, for later attempts too."""
        if rollout.deadline == math.inf:
            loop = asyncio.get_running_loop()
            rollout.started = loop.time()
            rollout.deadline = rollout.started + self._settings.rollout_timeout_s
            self._ring_at(rollout.run, rollout.deadline)

    def _expire(self, run: GroupRun) -> None:
        """End the rollouts whose time is up, and look again when the next one's is."""
        loop = asyncio.get_running_loop()
        run.timer = None
        now, following = loop.time() + 1e-4, math.inf
        for rollout in list(run.live.values()):
            deadline = self._latest(rollout)
            if deadline > now:
                following = min(following, deadline)
            elif not rollout.is_timed_out:
                rollout.is_timed_out = True
                rollout.session.close()
                if rollout.task is not None:
                    rollout.task.cancel()
                loop.call_later(self._settings.grace_s, self._give_up, rollout)
        if following < math.inf:
            self._ring_at(run, following)

    def _ring_at(self, run: GroupRun, when: float) -> None:
        """Have `_expire` look at the group then, or before."""
        if run.timer is not None:
            if run.timer.when() <= when:
                return
            run.timer.cancel()
        run.timer = asyncio.get_running_loop().call_at(when, self._expire, run)

    def _latest(self, rollout: Rollout) -> float:
        """When its time is up. While it waits to be scored with its group the clock stands still, for two limits at
        most: the others have one each, and may wait for a lane before.
        """
        waits = rollout.waits_since is not None
        return rollout.deadline + (2.0 * self._settings.rollout_timeout_s if waits else 0.0)

    def _go_on(self, run: GroupRun) -> None:
        """The group is being scored: the clocks of those who waited go on, with the grace period left at least."""
        now = asyncio.get_running_loop().time()
        for rollout in run.live.values():
            if rollout.waits_since is not None:
                later = rollout.deadline + now - rollout.waits_since
                rollout.deadline, rollout.waits_since = max(later, now + self._settings.grace_s), None
                self._ring_at(run, rollout.deadline)

    def _give_up(self, rollout: Rollout) -> None:
        """Inline code that ignores its cancellation is left behind; its session refuses whatever it says later."""
        if not rollout.is_over:
            self._ended(rollout, None, None)

    def _clear(self, run: GroupRun) -> None:
        """Give back the lanes of members that will not end by themselves."""
        if run.pending == 0:
            if run.timer is not None:
                run.timer.cancel()
            return
        if self._queue:
            self._queue = deque(item for item in self._queue if item[0] is not run)
        names = [rollout.session.name for rollout in run.live.values()]
        run.close()
        for name in names:
            self._hand_over(name)

    def _close(self, run: GroupRun) -> GroupOutcome:
        """What the group amounts to, and what that says about its task."""
        if run.refund is Refund.STALE:
            return GroupOutcome(group=None, refund=Refund.STALE, num_failed=run.num_failed)
        outcome = run.outcome(self._settings.min_group or run.num)
        if not run.training:
            return msgspec.structs.replace(outcome, refund=None)
        key = (run.task.taskset, run.task.key)
        if outcome.refund is None:
            self._failed.pop(key, None)
            return outcome
        self._failed[key] = self._failed.get(key, 0) + 1
        if self.is_quarantined(run.task):
            return msgspec.structs.replace(outcome, refund=Refund.QUARANTINED)
        return outcome

    # ------------------------------------------------------------------------------------------------ helpers

    def _with_stops(self, sampling: Sampling) -> Sampling:
        """The model's own end tokens end every answer."""
        missing = tuple(i for i in self._tokenizer.stop_ids if i not in sampling.stop_ids)
        return msgspec.structs.replace(sampling, stop_ids=(*sampling.stop_ids, *missing)) if missing else sampling

    def _goes_away(self, bound: BoundWorkflow) -> bool:
        return self._runners is not None and self._goes_to_runner(bound)

    def _goes_to_runner(self, bound: BoundWorkflow) -> bool:
        match self._settings.runner:
            case "inline":
                return False
            case "process":
                return True
            case _:
                return not bound.is_ours and bound.spec is not None

    def _check_place(self, bound: BoundWorkflow) -> None:
        """Refuse what a runner was asked for and cannot import; watch what runs beside the loop instead."""
        if not self._goes_away(bound):
            self._watchdog.start()
        if self._settings.runner == "process" and bound.spec is None:
            raise ConfigError(
                "explorer.runner",
                f"workflow {bound.name} or its reward cannot be imported by a runner process",
                "classes and functions at the top of a module",
                "move it into a file (plugins: [my.py]), or write runner: inline",
            )
