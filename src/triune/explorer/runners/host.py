"""A runner process: runs workflows and asks the explorer for every token. Started by `RunnerPool`."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from triune.explorer.assemble import Finished
from triune.explorer.binding import BoundWorkflow, from_spec
from triune.explorer.model import Model
from triune.explorer.results import read_result
from triune.explorer.runners.frames import (
    Ask,
    AskReward,
    Cancel,
    Done,
    Frame,
    Note,
    Reply,
    Start,
    ToRunner,
    encode,
    from_ids,
    read_frame,
    to_error,
    to_failed,
    to_ids,
)
from triune.explorer.session import Answer
from triune.explorer.threads import run_in_thread
from triune.ports import Reward
from triune.records import Group, GroupId, RolloutId, Stop, Task, encode_group


class Remote:
    """What `Model` talks to in a runner: the session's calls, sent to where the session is."""

    def __init__(self, host: Host, run: int) -> None:
        self._host, self._run = host, run

    async def chat(
        self, messages: Sequence[Any], tools: Sequence[Any], options: Mapping[str, Any] | None, key: str
    ) -> Answer:
        """See `Session.chat`."""
        return self._answer(await self._host.ask(
            Ask(run=self._run, call=self._host.number(), messages=list(messages), tools=list(tools),
                options=None if options is None else dict(options))
        ))  # fmt: skip

    async def generate(self, prompt: Any, options: Mapping[str, Any] | None, key: str) -> Answer:
        """See `Session.generate`."""
        text = prompt if isinstance(prompt, str) else ""
        ids = None if isinstance(prompt, str) else to_ids(prompt)
        plain = None if options is None else dict(options)
        ask = Ask(run=self._run, call=self._host.number(), ids=ids, text=text, options=plain)
        return self._answer(await self._host.ask(ask))

    async def score(self, task: Task, answer: str) -> Reward:
        """Have the answer scored where the session is."""
        reply = await self._host.ask(AskReward(run=self._run, call=self._host.number(), answer=answer))
        assert reply.reward is not None
        return reply.reward

    def note_turn(self, *, reward: float | None = None, state_key: str | None = None) -> None:
        """See `Session.note_turn`."""
        self._host.send(Note(run=self._run, turn=(None if reward is None else float(reward), state_key)))

    def note(self, **metrics: float) -> None:
        """See `Session.note`."""
        self._host.send(Note(run=self._run, metrics={name: float(value) for name, value in metrics.items()}))

    def end(self, stop: Stop) -> None:
        """See `Session.end`."""
        self._host.send(Note(run=self._run, end=stop))

    @staticmethod
    def _answer(reply: Reply) -> Answer:
        return Answer(text=reply.text, tokens=from_ids(reply.tokens), stop=reply.stop, turn=reply.turn)


class Host:
    """The runner's event loop and its connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Reply]] = {}
        self._runs: dict[int, asyncio.Task[None]] = {}
        self._bound: dict[bytes, BoundWorkflow] = {}
        self._in_threads: set[int] = set()
        self.ticks = 0

    def number(self) -> int:
        """A number for the next question."""
        return next(self._numbers)

    def send(self, frame: Frame) -> None:
        """Write a frame; from any thread, in order."""
        if threading.get_ident() == self._thread:
            self._writer.write(encode(frame))
        else:
            self._loop.call_soon_threadsafe(self._writer.write, encode(frame))

    async def ask(self, frame: Ask | AskReward) -> Reply:
        """Ask and wait; raises what the explorer raised."""
        result: asyncio.Future[Reply] = self._loop.create_future()
        self._asked[frame.call] = result
        self.send(frame)
        try:
            reply = await result
        finally:
            self._asked.pop(frame.call, None)
        if reply.error is not None:
            raise to_error(reply.error)
        return reply

    def tick(self, every_s: float) -> None:
        """Show the watch that the loop is alive, again and again."""
        self.ticks += 1
        self._loop.call_later(every_s, self.tick, every_s)

    def watch(self, block_s: float, alarm: int) -> None:
        """In a thread: while one rollout blocks the loop, write its number to the pipe `alarm`.

        The explorer then takes the other rollouts away; the one that blocks may go on until its deadline.
        """
        seen, since = -1, time.monotonic()
        while True:
            time.sleep(block_s / 4)
            if self.ticks != seen:
                seen, since = self.ticks, time.monotonic()
            elif time.monotonic() - since >= block_s:
                task = asyncio.current_task(self._loop)
                _, _, number = task.get_name().partition("run ") if task is not None else ("", "", "")
                if number.isdigit():
                    os.write(alarm, int(number).to_bytes(8, "little"))

    async def serve(self) -> None:
        """Do what the explorer says until it is gone."""
        decoder = msgspec.msgpack.Decoder(ToRunner)
        while (frame := await read_frame(self._reader, decoder)) is not None:
            match frame:
                case Start():
                    self._runs[frame.run] = self._loop.create_task(self._play(frame), name=f"run {frame.run}")
                case Cancel():
                    # A thread cannot be cancelled: its rollout has ended when it has. Its next call is refused.
                    if frame.run in self._runs and frame.run not in self._in_threads:
                        self._runs[frame.run].cancel()
                case Reply():
                    result = self._asked.get(frame.call)
                    if result is not None and not result.done():
                        result.set_result(frame)

    async def _play(self, start: Start) -> None:
        """One attempt; the boundary of a runner: whatever user code raises is sent, and nothing ends the process."""
        where = f"task {start.task.taskset}/{start.task.key}, rollout {start.name}"
        try:
            value = await self._call(start)
            done = _returned(start, value)
        except asyncio.CancelledError:
            done = Done(run=start.run)
        except (Exception, SystemExit) as error:
            done = Done(run=start.run, error=to_failed(error, where))
        self._runs.pop(start.run, None)
        self.send(done)

    async def _call(self, start: Start) -> Any:
        bound = self._bound.get(start.spec)
        if bound is None:
            bound = self._bound[start.spec] = from_spec(msgspec.msgpack.decode(start.spec))
        remote = Remote(self, start.run)
        score = None if start.scores_here else remote.score
        if bound.is_async:
            return await bound.call(start.task, Model(remote), score)
        self._in_threads.add(start.run)
        try:
            return await run_in_thread(bound, start.task, Model(remote), score, start.name)
        finally:
            self._in_threads.discard(start.run)


def _returned(start: Start, value: Any) -> Done:
    """What the workflow returned, converted where its types are known."""
    finished = Finished(session=_Named())  # type: ignore[arg-type]
    read_result(value, finished, start.task, start.name)
    if finished.experiences is not None:
        rollout = finished.session.rollout
        group = Group(id=rollout.group, task=start.task, records=tuple(finished.experiences))
        return Done(run=start.run, experiences=encode_group(group))
    return Done(run=start.run, reward=finished.reward)


class _Named:
    """Stands for the session, which is in another process; real ids are given there."""

    rollout = RolloutId(GroupId("run", "runner", "task", 0), 0)


def _follow_parent() -> None:
    """End when the explorer is gone, also while user code blocks the loop."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


async def _main(descriptor: int, alarm: int, block_s: float) -> None:
    threading.Thread(target=_follow_parent, daemon=True).start()
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=descriptor), limit=2**26)
    host = Host(reader, writer)
    host.tick(block_s / 4)
    threading.Thread(target=host.watch, args=(block_s, alarm), daemon=True).start()
    await host.serve()
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
