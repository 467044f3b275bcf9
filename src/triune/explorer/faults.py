"""How a rollout can fail, and which boundary it crossed when it did."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from triune.errors import EngineError, EnvironmentFault, RewardError, RolloutError
from triune.records import Stop


class SessionClosed(RolloutError):
    """A call came after its rollout had ended; nothing is recorded any more."""


class ContextFull(RolloutError):
    """The conversation leaves no room for another token. A workflow may catch it and return what was reached."""


class Aborted(RolloutError):
    """The engine gave up a completion before the policy had ended it."""


class RunnerDied(RolloutError):
    """The process that ran the workflow is gone; the rollout is tried again elsewhere."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One failed attempt, as data.

    Attributes:
        boundary: What it crossed: workflow, reward, environment, engine, context, timeout, runner, aborted.
        stop: The reason stored with its experience.
        error: One line.
        retry: Whether another attempt may end differently.
    """

    boundary: str
    stop: Stop
    error: str
    retry: bool = True


def classify(error: BaseException) -> Failure:
    """Name the boundary an exception crossed."""
    text = f"{type(error).__name__}: {error}" if not isinstance(error, RolloutError | EngineError) else str(error)
    text = text.strip().replace("\n", " ")[:500]
    match error:
        case ContextFull():
            return Failure(boundary="context", stop=Stop.CONTEXT, error=text, retry=False)
        case Aborted():
            return Failure(boundary="aborted", stop=Stop.ABORTED, error=text)
        case RunnerDied():
            return Failure(boundary="runner", stop=Stop.ABORTED, error=text)
        case RewardError():
            return Failure(boundary="reward", stop=Stop.DONE, error=text, retry=False)
        case EnvironmentFault():
            return Failure(boundary="environment", stop=Stop.ENVIRONMENT_ERROR, error=text)
        case EngineError():
            return Failure(boundary="engine", stop=Stop.ABORTED, error=text)
        case asyncio.CancelledError():
            return Failure(boundary="aborted", stop=Stop.ABORTED, error="cancelled")
        case _:
            return Failure(boundary="workflow", stop=Stop.ENVIRONMENT_ERROR, error=text)


def as_info(failure: Failure, member: int, attempt: int) -> Mapping[str, Any]:
    """What is stored of a failure in the group's info."""
    return {
        "member": member,
        "attempt": attempt,
        "boundary": failure.boundary,
        "stop": failure.stop.value,
        "error": failure.error,
    }
