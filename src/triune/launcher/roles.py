"""Run the roles of a process beside each other, and end all of them when one fails."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

from triune.errors import RunFailed, TriuneError

GRACE_S = 10.0
"""How long the other roles may take to clean up when one has failed."""

ORDERLY_S = 20.0
"""How long a run may take to its next step boundary after the first signal."""


async def run_roles(roles: Mapping[str, Coroutine[Any, Any, None]]) -> None:
    """Run every role until all have ended.

    Raises:
        RunFailed: A role failed; the others were cancelled. Names the role, chains the cause.
        TriuneError: A configuration problem that only showed when the role began; raised as it is.
    """
    running = {asyncio.create_task(role, name=name): name for name, role in roles.items()}
    try:
        await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
        failed = [task for task in running if task.done() and not task.cancelled() and task.exception() is not None]
        if failed:
            raise _failure(running[failed[0]], failed[0].exception())
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=GRACE_S)


def _failure(role: str, error: BaseException | None) -> BaseException:
    if isinstance(error, TriuneError) and error.exit_code == 2:
        return error
    text = str(error).strip() or type(error).__name__
    if not isinstance(error, TriuneError):
        text = f"{type(error).__name__}: {text}"
    failure = RunFailed(role, text)
    failure.__cause__ = error
    return failure


@contextlib.contextmanager
def interruptible(task: asyncio.Task[Any], stop: Callable[[str], bool]) -> Iterator[list[str]]:
    """Inside, the first SIGINT or SIGTERM asks the run to stop, and the second one cancels `task`.

    Args:
        task: What runs inside.
        stop: Asks for an orderly end, with a checkpoint; False when there is nothing to ask, then `task` is cancelled.

    Yields:
        Names of the signals that came. They reach only the main thread: in a notebook's worker thread none come.
    """
    caught: list[str] = []
    loop = asyncio.get_running_loop()

    def catch(name: str) -> None:
        caught.append(name)
        if len(caught) > 1 or not stop(name):
            task.cancel()
        else:
            loop.call_later(ORDERLY_S, task.cancel)

    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    for number in numbers:
        loop.add_signal_handler(number, catch, number.name)
    try:
        yield caught
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
