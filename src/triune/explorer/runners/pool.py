"""Starts runner processes, gives them rollouts, kills what does not end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from triune.explorer.binding import BoundWorkflow
from triune.explorer.faults import RunnerDied
from triune.explorer.runners.frames import (
    Ask,
    AskReward,
    Cancel,
    Done,
    Frame,
    Garbled,
    Note,
    Reply,
    Start,
    ToExplorer,
    encode,
    from_ids,
    read_frame,
    to_error,
    to_failed,
    to_ids,
)
from triune.explorer.session import Session
from triune.records import Task, decode_group


class _Run:
    """One rollout in a runner."""

    __slots__ = ("calls", "is_cancelled", "is_exclusive", "is_started", "result", "score", "session", "task")

    def __init__(
        self, session: Session, task: Task, score: Callable[..., Any] | None, result: asyncio.Future[Any], alone: bool
    ) -> None:
        self.session, self.task, self.score, self.result = session, task, score, result
        self.is_exclusive, self.is_started, self.is_cancelled = alone, False, False
        self.calls: set[asyncio.Task[None]] = set()


class _Runner:
    """One process and its connection."""

    def __init__(self, process: subprocess.Popen[bytes], writer: asyncio.StreamWriter, alarm: int) -> None:
        self.process, self.writer, self.alarm = process, writer, alarm
        self.runs: dict[int, _Run] = {}
        self.listener: asyncio.Task[None] | None = None

    @property
    def is_taken(self) -> bool:
        """Whether a blocking rollout has it for itself."""
        return any(run.is_exclusive for run in self.runs.values())

    def send(self, frame: Frame) -> None:
        """Write a frame; a runner that is gone hears nothing, its listener notices."""
        with contextlib.suppress(ConnectionError, RuntimeError):
            self.writer.write(encode(frame))

    def kill(self) -> None:
        """End the process and everything it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


class RunnerPool:
    """Runner processes: each runs many async rollouts at once, or one blocking rollout alone.

    They start when first needed. A rollout that is cancelled has `grace_s` to end; then its process is killed, what
    else ran there fails with `RunnerDied` (the scheduler tries it again), and a new process takes its place. Async code
    that blocks its process keeps it for itself until its deadline; the rollouts beside it are tried again elsewhere.

    Args:
        num: Processes at most.
        grace_s: Seconds between cancelling and killing.
        block_s: Seconds without a sign of life after which a process counts as blocked.
    """

    def __init__(self, num: int, *, grace_s: float = 2.0, block_s: float = 5.0) -> None:
        self._num, self._grace_s, self._block_s = num, grace_s, block_s
        self._runners: list[_Runner] = []
        self._numbers = itertools.count()
        self._waiting: deque[tuple[int, _Run, asyncio.Future[_Runner]]] = deque()
        self._starting = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(
        self,
        bound: BoundWorkflow,
        task: Task,
        session: Session,
        score: Callable[..., Any] | None,
        started: Callable[[], None],
    ) -> Any:
        """See the protocol `Runners` of the scheduler."""
        number, loop = next(self._numbers), asyncio.get_running_loop()
        run = _Run(session, task, score, loop.create_future(), not bound.is_async)
        place: asyncio.Future[_Runner] = loop.create_future()
        self._waiting.append((number, run, place))
        self._assign()
        try:
            runner = await place
            started()
            spec = msgspec.msgpack.encode(bound.spec)
            run.is_started = True
            runner.send(Start(run=number, spec=spec, task=task, name=session.name, scores_here=score is None))
            return await run.result
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self._take_back(place.result(), number)
            raise

    async def close(self) -> None:
        """Kill all runners."""
        self._num = 0
        for runner in self._runners:
            runner.kill()
        listeners = [runner.listener for runner in self._runners if runner.listener is not None]
        await asyncio.gather(*listeners, return_exceptions=True)

    @property
    def pids(self) -> list[int]:
        """Processes that run now."""
        return [runner.process.pid for runner in self._runners]

    # ------------------------------------------------------------------------------------------------ choosing

    def _choose(self, alone: bool) -> _Runner | None:
        """The least busy runner that may take it; a runner that could still be started is better than a busy one."""
        free = [runner for runner in self._runners if not (runner.runs if alone else runner.is_taken)]
        if not free:
            return None
        best = min(free, key=lambda runner: len(runner.runs))
        could_start = len(self._runners) + self._starting < self._num
        return None if best.runs and could_start else best

    def _assign(self) -> None:
        """Give waiting rollouts to runners, first come first served."""
        while self._waiting:
            number, run, place = self._waiting[0]
            if not place.done():
                runner = self._choose(run.is_exclusive)
                if runner is None:
                    self._start_if_needed()
                    return
                runner.runs[number] = run
                place.set_result(runner)
            self._waiting.popleft()

    def _start_if_needed(self) -> None:
        if len(self._runners) + self._starting < self._num:
            self._starting += 1
            self._spawn(self._start())

    # ----------------------------------------------------------------------------------------------- processes

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        alarm, theirs_alarm = os.pipe()
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        handles = [theirs.fileno(), theirs_alarm]
        command = [sys.executable, "-m", "triune.explorer.runners.host", *map(str, handles), str(self._block_s)]
        try:
            process = subprocess.Popen(
                command,
                pass_fds=handles,
                env=environment,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=2,  # what user code prints must not get between the lines of `--json`
            )
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=2**26)
        except OSError as error:  # no memory, no more processes or files: whoever waits must hear of it
            ours.close()
            os.close(alarm)
            self._refuse(error)
            return
        finally:
            theirs.close()
            os.close(theirs_alarm)
            self._starting -= 1
        runner = _Runner(process, writer, alarm)
        asyncio.get_running_loop().add_reader(alarm, self._hear_alarm, runner)
        self._runners.append(runner)
        runner.listener = asyncio.get_running_loop().create_task(self._listen(runner, reader))
        self._assign()

    def _refuse(self, error: OSError) -> None:
        """Fail the rollouts that wait for a process that cannot be started; no deadline runs for them yet."""
        if self._runners:
            return  # one of those will take them
        waiting, self._waiting = self._waiting, deque()
        for _, run, place in waiting:
            if not place.done():
                where, do = f"rollout {run.session.name}", "free memory, or lower explorer.runners"
                place.set_exception(RunnerDied(where, f"no runner process can be started ({error})", "", do))

    async def _listen(self, runner: _Runner, reader: asyncio.StreamReader) -> None:
        """Answer what the runner asks; when it is gone, fail what ran there."""
        decoder = msgspec.msgpack.Decoder(ToExplorer)
        try:
            while (frame := await read_frame(reader, decoder)) is not None:
                run = runner.runs.get(frame.run)
                if run is not None:
                    self._hear(runner, run, frame)
        finally:
            runner.kill()
            runner.writer.close()
            asyncio.get_running_loop().remove_reader(runner.alarm)
            os.close(runner.alarm)
            self._runners.remove(runner)
            await asyncio.to_thread(runner.process.wait)
            self._bury(runner)
            if self._num:
                self._assign()

    def _bury(self, runner: _Runner) -> None:
        code = runner.process.returncode
        for run in runner.runs.values():
            _stop_calls(run)
            if not run.result.done():
                where = f"rollout {run.session.name}"
                error = RunnerDied(where, f"its runner process ended (exit {code})", "", "it is tried again in another")
                run.result.set_exception(error)
        runner.runs.clear()

    def _take_back(self, runner: _Runner, number: int) -> None:
        """The rollout's time is up: ask, then kill; a process that never heard of it goes on with the next one."""
        run = runner.runs.get(number)
        if run is None:
            return
        if not run.is_started:
            del runner.runs[number]
            self._assign()
            return
        run.is_cancelled = True
        _stop_calls(run)
        runner.send(Cancel(run=number))
        asyncio.get_running_loop().call_later(self._grace_s, self._kill_if_there, runner, number)

    def _kill_if_there(self, runner: _Runner, number: int) -> None:
        if number in runner.runs:
            runner.kill()

    def _hear_alarm(self, runner: _Runner) -> None:
        """One rollout blocks its process: leave it alone there, and have the others tried again."""
        data = os.read(runner.alarm, 8)
        culprit = runner.runs.get(int.from_bytes(data, "little")) if data else None
        if culprit is None:
            return
        culprit.is_exclusive = True
        for number, run in runner.runs.items():
            if run is not culprit and not run.result.done():
                _stop_calls(run)
                runner.send(Cancel(run=number))
                where, beside = f"rollout {run.session.name}", culprit.session.name
                run.result.set_exception(RunnerDied(where, f"rollout {beside} blocks the runner process they share"))

    # --------------------------------------------------------------------------------------------------- frames

    def _hear(self, runner: _Runner, run: _Run, frame: Any) -> None:
        match frame:
            case Done():
                _stop_calls(run)
                del runner.runs[frame.run]
                _settle(run, frame)
                self._assign()
            case Note():
                if not run.session.is_closed:
                    _take_note(run.session, frame)
            case Garbled():
                self._hear_garbled(runner, run, frame)
            case Ask() | AskReward():
                call = self._spawn(self._answer(runner, run, frame))
                run.calls.add(call)
                call.add_done_callback(run.calls.discard)

    def _hear_garbled(self, runner: _Runner, run: _Run, frame: Garbled) -> None:
        """What user code sent with a wrong type fails its rollout, and none beside it."""
        if frame.call is not None:
            runner.send(Reply(call=frame.call, error=frame.error))
        elif frame.is_last:
            self._hear(runner, run, Done(run=frame.run, error=frame.error))
        else:
            _settle(run, Done(run=frame.run, error=frame.error))
            self._take_back(runner, frame.run)

    async def _answer(self, runner: _Runner, run: _Run, frame: Ask | AskReward) -> None:
        try:
            reply = await _reply(run, frame)
        except Exception as error:  # whatever its question made fail (a template, a reward) is the workflow's to hear
            reply = Reply(call=frame.call, error=to_failed(error, run.session.name))
        runner.send(reply)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _reply(run: _Run, frame: Ask | AskReward) -> Reply:
    session = run.session
    if isinstance(frame, AskReward):
        assert run.score is not None
        return Reply(call=frame.call, reward=await run.score(run.task, frame.answer))
    key = f"runner/{frame.call}"
    if frame.messages is not None:
        answer = await session.chat(frame.messages, frame.tools, frame.options, key)
    else:
        prompt = frame.text if frame.ids is None else from_ids(frame.ids)
        answer = await session.generate(prompt, frame.options, key)
    return Reply(call=frame.call, text=answer.text, tokens=to_ids(answer.tokens), stop=answer.stop, turn=answer.turn)


def _take_note(session: Session, note: Note) -> None:
    if note.metrics is not None:
        session.note(**note.metrics)
    if note.turn is not None:
        session.note_turn(reward=note.turn[0], state_key=note.turn[1])
    if note.end is not None:
        session.end(note.end)


def _settle(run: _Run, done: Done) -> None:
    if run.result.done():
        return
    if done.error is not None:
        run.result.set_exception(to_error(done.error))
    elif done.experiences is not None:
        run.result.set_result(list(decode_group(done.experiences).experiences))
    else:
        run.result.set_result(done.reward)


def _stop_calls(run: _Run) -> None:
    for call in run.calls:
        call.cancel()
