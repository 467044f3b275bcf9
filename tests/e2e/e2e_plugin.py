"""User code that goes wrong in every way a run must survive or name."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from typing import Any

from triune import Model, Task, reward, workflow
from triune.registry import brick
from triune.testing.engines import ScriptedEngine


@workflow("hangs")
async def hangs(task: Task, model: Model) -> float:
    await asyncio.sleep(3600)
    return 0.0


@workflow("blocks")
def blocks(task: Task, model: Any) -> float:
    time.sleep(3600)
    return 0.0


@workflow("raises")
async def raises(task: Task, model: Model) -> float:
    raise ValueError(f"no such tool: {task.key}")


@workflow("says_its_pid")
def says_its_pid(task: Task, model: Any) -> float:
    with open(task.data["path"] if "path" in task.data else os.environ["PID_FILE"], "a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(0.05)
    return float(len(model.generate(task.data["question"]).text) % 2)


@reward("not_a_number")
def not_a_number(task: Task, answer: str) -> float:
    return float("nan")


@reward("sometimes_not_a_number")
def sometimes_not_a_number(task: Task, answer: str) -> float:
    return float("nan") if int(task.key[1:]) % 4 == 0 else float(len(answer) % 2)


@brick("engine", "liar")
@dataclass(frozen=True, kw_only=True)
class Liar:
    """The scripted engine as a run file names it, telling one of its lies."""

    lie: str = ""
    dtype: str = "float32"

    def __call__(self, model: Any, tokenizer: Any, lane: Any, **options: Any) -> ScriptedEngine:
        def say(request: Any) -> str:
            made.requests.clear()  # it would remember all of a long run
            made.swaps.clear()
            return str(request.seed % 100)

        made = ScriptedEngine(script=say, tokenizer=tokenizer, max_context=64, version=-1)
        match self.lie:
            case "crashes":
                made.lies.crashes_after = 9
            case "refuses":
                made.lies.refuses_swaps = True
            case "hangs":
                made.lies.hangs = True
        return made


@brick("sink", "rss")
@dataclass(frozen=True, kw_only=True)
class Rss:
    """Writes the resident memory of this process at every step."""

    path: str

    def __call__(self, info: Any) -> Rss:
        return self

    def write(self, row: Any) -> None:
        """Only whole steps count."""

    def merged(self, step: int, metrics: Any) -> None:
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        with open(self.path, "a") as file:
            file.write(f"{step} {pages * os.sysconf('SC_PAGE_SIZE')}\n")

    def close(self) -> None:
        """Nothing is open."""
