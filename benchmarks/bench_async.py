"""Synchronous, one step off and in flight: our scheduler and buffer against a discrete-event model.

An environment with log-normal latencies and no model time, a trainer that sleeps, the real explorer, scheduler,
admission and buffer (in memory). Each setting must stay within 15 % of what `async_model` predicted for the same
latencies, and no experience may be trained on beyond its staleness bound.

    TRIUNE_BENCH_STEPS   steps per setting (12)
    TRIUNE_BENCH_UNIT_S  seconds of a time unit, the median latency (0.04)
    TRIUNE_BENCH_SEED    of the latencies (0)
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import async_model
from async_model import SETTINGS, Setting

from triune.buffer import BufferSettings, StoredBuffer, open_buffer
from triune.explorer import Explorer, ExplorerSettings, Scheduler, bind_workflow
from triune.models import ChatTokenizer
from triune.pipelines import Shaped
from triune.ports import AdmissionRule, WeightUpdate
from triune.records import Task
from triune.testing import chats
from triune.testing.engines import ScriptedEngine

STEPS = int(os.environ.get("TRIUNE_BENCH_STEPS", "12"))
UNIT_S = float(os.environ.get("TRIUNE_BENCH_UNIT_S", "0.04"))
SEED = int(os.environ.get("TRIUNE_BENCH_SEED", "0"))
TOLERANCE = 0.15


class EndlessTasks:
    """Task after task; nothing but a number in them."""

    data_hash = "endless"

    def __init__(self) -> None:
        self.given = 0

    def next(self) -> tuple[Task, Any]:
        """The next number."""
        self.given += 1
        return Task(key=str(self.given), data={"question": "?"}), self.given

    def seek(self, cursor: Any) -> None:
        """Go on after a number."""
        self.given = cursor or 0

    def find(self, taskset: str, key: str) -> Task:
        """Any number is a task."""
        return Task(key=key, taskset=taskset, data={"question": "?"})


class SilentMonitor:
    """Takes metrics and waits, shows nothing."""

    def log(self, metrics: Any, *, role: str, step: int) -> None:
        """Nothing."""

    def timed(self, stage: str) -> contextlib.AbstractContextManager[None]:
        """Nothing."""
        return contextlib.nullcontext()

    def waiting(self, role: str, for_what: str) -> contextlib.AbstractContextManager[None]:
        """Nothing."""
        return contextlib.nullcontext()


class NoWeights:
    """A channel through which nothing travels."""

    async def fetch(self, update: WeightUpdate) -> dict[str, Any]:
        """No tensors."""
        return {}

    def release(self, version: int) -> None:
        """Nothing is kept."""


class Measured:
    """One real run of a setting."""

    def __init__(self, setting: Setting, tokenizer: ChatTokenizer) -> None:
        self.setting = setting
        self.latency = async_model.latencies(setting.sigma, SEED)
        self.engine = ScriptedEngine(script=["1"], tokenizer=tokenizer.hf, version=-1)
        options = ExplorerSettings(engine=self.engine, max_rollouts=setting.lanes, max_tokens=8)
        bound = bind_workflow(self.wait_and_answer)
        self.scheduler = Scheduler(
            engine=self.engine, tokenizer=tokenizer, workflows=lambda task: bound, settings=options, seed=SEED
        )
        self.published: list[float] = []
        self.staleness: list[int] = []

    async def wait_and_answer(self, task: Task, model: Any) -> float:
        """The environment: nothing but latency."""
        latency = next(self.latency)
        await model.chat().ask(task.data["question"])
        await asyncio.sleep(latency * UNIT_S)
        return 1.0

    async def run(self, buffer: StoredBuffer) -> None:
        """Explore and train `STEPS` steps."""
        await buffer.open_run("bench", config_hash="", data_hash="")
        rule = AdmissionRule(max_staleness=self.setting.staleness, fresh=self.setting.groups)
        explorer = Explorer(
            tasks=EndlessTasks(),
            buffer=buffer,
            scheduler=self.scheduler,
            engine=self.engine,
            channel=NoWeights(),  # type: ignore[arg-type]
            apply=lambda group: Shaped(group=group),
            rule=rule,
            group_size=self.setting.size,
            monitor=SilentMonitor(),
            style=self.setting.style,  # type: ignore[arg-type]
        )
        await asyncio.gather(explorer.run(), self.train(buffer))

    async def train(self, buffer: StoredBuffer) -> None:
        """A trainer that sleeps."""
        await publish(buffer, 0)
        start = time.perf_counter()
        for step in range(1, STEPS + 1):
            leases = await buffer.lease(self.setting.groups, max_staleness=self.setting.staleness)
            for lease in leases:
                self.staleness += [step - 1 - row.oldest_version for row in lease.group.experiences]
            await asyncio.sleep(self.setting.step * UNIT_S)
            await publish(buffer, step)
            self.published.append(time.perf_counter() - start)
        await buffer.finish("all steps done")


async def publish(buffer: StoredBuffer, step: int) -> None:
    """A new version of no weights."""
    version = await buffer.begin_version(step)
    await buffer.commit_version(WeightUpdate(version=version, step=step, digest="", dtype="float32"))


def measure(setting: Setting, tokenizer: ChatTokenizer) -> Measured:
    """Run a setting with a buffer of its own."""
    measured = Measured(setting, tokenizer)

    async def body() -> None:
        with tempfile.TemporaryDirectory() as folder:
            buffer = open_buffer(BufferSettings(store="memory"), Path(folder))
            await measured.run(buffer)
            await buffer.close()

    gc.collect()
    gc.freeze()
    asyncio.run(body())
    worst = max(measured.staleness)
    assert worst <= setting.staleness, f"staleness {worst} beyond the bound {setting.staleness}"
    return measured


def main() -> int:
    """Predict, measure, compare; exit 1 when a setting is off by more than 15 %."""
    tokenizer = ChatTokenizer(chats.byte_tokenizer())
    base = SETTINGS["sync drain"]
    predicted = {name: async_model.Model(setting, SEED).run(STEPS) for name, setting in SETTINGS.items()}
    bound = async_model.limit(base, predicted["sync drain"][-1] / STEPS)
    print(f"{base.groups} groups x {base.size}, {base.lanes} lanes, {STEPS} steps, unit {UNIT_S * 1000:.0f} ms; "
          f"limit of any speed-up {bound:.2f}x")  # fmt: skip
    columns = f"{'model':>9s} {'measured':>9s} {'off by':>7s} {'model':>7s} {'measured':>9s} {'staleness':>10s}"
    print(f"{'setting':26s} {columns}")
    seconds: dict[str, float] = {}
    figures: dict[str, Any] = {"ratio_measured_to_model": {}}
    for name, setting in SETTINGS.items():
        measured = measure(setting, tokenizer)
        seconds[name] = measured.published[-1]
        model_s = predicted[name][-1] * UNIT_S
        off = seconds[name] / model_s
        model_ratio = predicted["sync drain"][-1] / predicted[name][-1]
        ratio = seconds["sync drain"] / seconds[name]
        print(f"{name:26s} {model_s:8.2f}s {seconds[name]:8.2f}s {off - 1:+6.1%} {model_ratio:6.2f}x {ratio:8.2f}x "
              f"{max(measured.staleness):4d} <= {setting.staleness}")  # fmt: skip
        key = name.replace(",", "").replace(" ", "_")
        figures["ratio_measured_to_model"][key] = round(off, 3)
        if name != "sync drain":
            figures[f"ratio_{key}"] = round(ratio, 3)
            figures[f"ratio_{key}_model"] = round(model_ratio, 3)
    figures["ratio_limit"] = round(bound, 3)
    worst = max(abs(math.log(off)) for off in figures["ratio_measured_to_model"].values())
    figures["within_tolerance"] = worst <= math.log(1 + TOLERANCE)
    print(json.dumps(figures))
    return 0 if figures["within_tolerance"] else 1


if __name__ == "__main__":
    sys.exit(main())
