"""Workflows that runner processes import."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass

from triune.errors import EnvironmentFault
from triune.ports import Reward
from triune.records import Stop
from triune.registry import brick


@brick("workflow", "polite")
@dataclass(frozen=True, kw_only=True)
class Polite:
    """Two questions, with notes."""

    question: str = "x"

    async def __call__(self, task, model, reward):
        chat = model.chat(system="s")
        first = await chat.ask(self.question)
        model.note_turn(reward=0.5, state_key="here")
        second = await chat.ask(first + task.data["question"])
        model.note(pid=float(os.getpid()))
        model.end(Stop.MAX_TURNS)
        return await reward(task, second)


def length(task, answer):
    """Reward."""
    return {"total": float(len(answer)), "style": 1.0}


def ranked(task, answers):
    """Reward of a whole group."""
    return [float(len(answer)) for answer in answers]


def blocking(task, model):
    """A plain function."""
    model.note(pid=float(os.getpid()))
    return float(model.chat().ask("x") == "7")


def scored_plain(task, model, reward):
    """A plain function that has itself scored."""
    return reward(task, model.chat().ask("x"))


def sleeps_for_ever(task, model):
    """Blocks, and would survive any polite timeout."""
    model.chat().ask("x")
    while True:
        try:
            time.sleep(60)
        except BaseException:
            continue


async def blocks_the_loop(task, model):
    """Async code that does not await, in one member; the others wait long enough to be hit by its end."""
    answer = await model.chat().ask("x")
    if answer.startswith("0.0"):
        time.sleep(60)
    await asyncio.sleep(0.3)
    return 1.0


async def raises(task, model):
    """User error."""
    raise EnvironmentFault("env", "down") if task.key == "env" else KeyError("anser")


async def exits(task, model):
    """Ends the interpreter, it thinks."""
    raise SystemExit(3)


async def dies(task, model):
    """Takes its process along, the first time."""
    answer = await model.chat().ask("x")
    if answer.endswith(".0"):
        os._exit(3)
    return 1.0


async def asks_for_nonsense(task, model):
    """A call that fails beside the session, with an error that is none of ours."""
    await model.generate([{"role": "user", "content": "x", "tool_calls": [5]}])
    return 1.0


def prints(task, model):
    """Says something to people."""
    print("said by user code", flush=True)
    return float(model.chat().ask("x") == "7")


async def notes_what_is_no_float(task, model):
    """Bools where numbers are due, which is fine; then the kind of mistake its task names."""
    await model.chat().ask("x")
    model.note(correct=True)
    model.note_turn(reward=True)
    if task.key == "state":
        model.note_turn(state_key=("a", 1))
        await asyncio.sleep(60)
    if task.key == "message":
        await model.generate([{"role": "user", "content": "x"}, object()])
    return Reward(total=True, parts={"style": True}, metrics={"seen": True})


async def waits_a_little(task, model):
    """Runs beside others."""
    await model.chat().ask("x")
    await asyncio.sleep(0.3)
    return 1.0
