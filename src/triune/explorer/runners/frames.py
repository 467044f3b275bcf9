"""What the explorer and a runner say to each other: msgpack frames over a socket pair, never pickle.

A frame is its length (4 bytes, little endian) and one of the structs below. `run` numbers a rollout's attempt, `call`
a question inside it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np

from triune import errors
from triune.errors import TriuneError, WorkflowError
from triune.explorer import faults
from triune.ports import Reward
from triune.records import Stop, Task


class Frame(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of all frames."""


class Start(Frame, frozen=True, tag="start"):
    """Explorer → runner: run this workflow on this task."""

    run: int
    spec: bytes
    task: Task
    name: str
    scores_here: bool


class Cancel(Frame, frozen=True, tag="cancel"):
    """Explorer → runner: its time is up."""

    run: int


class Failed(Frame, frozen=True, tag="failed"):
    """An exception: the name of its class and the four parts of its message."""

    name: str
    parts: tuple[str, str, str, str]


class Reply(Frame, frozen=True, tag="reply"):
    """Explorer → runner: the answer to a question; tokens are int32 bytes."""

    call: int
    text: str = ""
    tokens: bytes = b""
    stop: Stop = Stop.DONE
    turn: int = 0
    reward: Reward | None = None
    error: Failed | None = None


class Ask(Frame, frozen=True, tag="ask"):
    """Runner → explorer: continue this conversation, these ids (int32 bytes) or this text."""

    run: int
    call: int
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = []
    ids: bytes | None = None
    text: str = ""
    options: dict[str, Any] | None = None


class AskReward(Frame, frozen=True, tag="ask_reward"):
    """Runner → explorer: score this answer; the reward function needs the session or the whole group."""

    run: int
    call: int
    answer: str


class Note(Frame, frozen=True, tag="note"):
    """Runner → explorer: numbers, a note about the latest turn, or why the rollout ends."""

    run: int
    metrics: dict[str, float] | None = None
    turn: tuple[float | None, str | None] | None = None
    end: Stop | None = None


class Done(Frame, frozen=True, tag="done"):
    """Runner → explorer: the workflow returned a reward or experiences (an encoded group), or raised."""

    run: int
    reward: Reward | None = None
    experiences: bytes | None = None
    error: Failed | None = None


class Garbled(Frame, frozen=True, tag="garbled"):
    """What a frame from the runner is read as when a value in it has the wrong type: whose it was, and what is wrong.

    `call` is the question it was, None where it was none; `is_last` where the workflow had ended with it.
    """

    run: int
    error: Failed
    call: int | None = None
    is_last: bool = False


ToRunner = Start | Cancel | Reply
ToExplorer = Ask | AskReward | Note | Done

_encoder = msgspec.msgpack.Encoder(enc_hook=lambda value: value.tolist() if hasattr(value, "tolist") else str(value))


def encode(frame: Frame) -> bytes:
    """Length and body."""
    body = _encoder.encode(frame)
    return len(body).to_bytes(4, "little") + body


async def read_frame(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    """The next frame; None when the other side is gone, `Garbled` where user code put a wrong type into it."""
    try:
        size = int.from_bytes(await reader.readexactly(4), "little")
        body = await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        return _garbled(msgspec.msgpack.decode(body), error)


def _garbled(found: dict[str, Any], error: Exception) -> Garbled:
    """The envelope is ours and always right: it says whose frame it was."""
    kind = found["kind"]
    parts = (f"a workflow's {kind}", str(error), "numbers as metrics and rewards, text and mappings as messages", "")
    failed = Failed(name=WorkflowError.__name__, parts=parts)
    return Garbled(run=found["run"], error=failed, call=found.get("call"), is_last=kind == "done")


def to_ids(ids: Any) -> bytes:
    """int32 bytes of token ids."""
    return np.ascontiguousarray(ids, dtype=np.int32).tobytes()


def from_ids(data: bytes) -> Any:
    """Invert `to_ids`."""
    return np.frombuffer(data, dtype=np.int32)


def to_failed(error: BaseException, where: str) -> Failed:
    """Describe an exception; those that are not ours keep their type and message, and where in the code they arose."""
    if isinstance(error, TriuneError):
        return Failed(name=type(error).__name__, parts=(error.where, error.found, error.expected, error.do))
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    at = f" (at {place.tb_frame.f_code.co_filename}:{place.tb_lineno})" if place is not None else ""
    return Failed(name=WorkflowError.__name__, parts=(where, f"{type(error).__name__}: {error}{at}", "", ""))


def to_error(failed: Failed) -> TriuneError:
    """The exception that was described."""
    kind = getattr(faults, failed.name, None) or getattr(errors, failed.name, None)
    if not (isinstance(kind, type) and issubclass(kind, TriuneError)):
        kind = WorkflowError
    return kind(*failed.parts)
