"""Plain functions as workflows, each in a daemon thread: it may outlive its deadline, never the process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from triune.errors import WorkflowError
from triune.explorer.binding import BoundWorkflow
from triune.explorer.model import BlockingModel, Model
from triune.explorer.score import blocking
from triune.records import Task


async def run_in_thread(
    bound: BoundWorkflow, task: Task, model: Model, score: Callable[..., Any] | None, name: str
) -> Any:
    """Run the workflow and return what it returned.

    Args:
        bound: A workflow that is no coroutine function.
        task: Its task.
        model: Its model; it gets a `BlockingModel` around it.
        score: Replaces the scorer, see `session_score`.
        name: Of the thread.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()
    handle = BlockingModel(model, loop)
    reward = None if bound.scorer is None else blocking(score or bound.scorer.score, loop)

    def work() -> None:
        try:
            value, error = bound.call(task, handle, reward), None
        except BaseException as raised:  # carried to the loop, where the scheduler's boundary classifies it
            value, error = None, _as_failure(raised, name)
        loop.call_soon_threadsafe(_settle, result, value, error)

    threading.Thread(target=work, name=name, daemon=True).start()
    value = await result
    return await value if asyncio.iscoroutine(value) else value


def _as_failure(raised: BaseException, name: str) -> Exception:
    """What a future may carry: no StopIteration, and nothing that would end the loop (`sys.exit()`)."""
    if isinstance(raised, Exception) and not isinstance(raised, StopIteration):
        return raised
    error = WorkflowError(f"rollout {name}", f"raised {type(raised).__name__}: {raised}", "a reward")
    error.__traceback__ = raised.__traceback__
    return error


def _settle(result: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if result.done():
        return
    if error is not None:
        result.set_exception(error)
    else:
        result.set_result(value)
