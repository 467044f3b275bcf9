"""A run that lives is paused, resumed and stopped by rows in its store, from outside its process."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import triune
from triune.buffer import BufferSettings, open_buffer


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def ask(folder: Path, action: str, **fields: Any) -> str:
    """Write a control row as ann, and wait for its answer."""

    async def work() -> str:
        buffer = open_buffer(BufferSettings(), folder)
        try:
            row = await buffer.steer("small", action, by="ann", fields=fields)
            while True:
                (answer,) = (each for each in await buffer.control_history("small") if each["id"] == row)
                if answer["acked_by"]:
                    return answer["outcome"]
                await asyncio.sleep(0.02)
        finally:
            await buffer.close()

    return asyncio.run(asyncio.wait_for(work(), 60))


@pytest.fixture
def run_in_thread(bench: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("triune.launcher.session.STEER_S", 0.02)
    summaries: list[dict[str, Any]] = []
    config = bench.config(tasks={"reward": {"use": "format", "pattern": ".*[a-m].*"}}, trainer={"steps": 100_000})
    thread = threading.Thread(target=lambda: summaries.append(triune.run(config)), daemon=True)
    thread.start()
    yield summaries
    thread.join(60)
    assert not thread.is_alive()


def test_a_run_pauses_with_a_checkpoint_goes_on_and_stops(bench: Any, run_in_thread: list[dict[str, Any]]):
    folder = bench.runs / "small"

    def steps() -> list[int]:
        rows = (json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().split(b"\n")[:-1])
        return [row["step"] for row in rows if row["role"] == "trainer" and row["step"]]

    wait_for(lambda: (folder / "metrics.jsonl").exists() and len(steps()) > 1)
    assert ask(folder, "pause") == "pauses after this step"
    wait_for(lambda: any((folder / "checkpoints").glob(f"step-{max(steps()):08d}")))
    rested = max(steps())
    time.sleep(0.3)
    assert max(steps()) == rested
    assert ask(folder, "set", seed=3).startswith("refused")
    assert ask(folder, "resume") == "goes on"
    wait_for(lambda: max(steps()) > rested)
    assert ask(folder, "pause") == "pauses after this step"
    assert ask(folder, "stop") == "stops after this step"
    wait_for(lambda: bool(run_in_thread))
    (summary,) = run_in_thread
    assert summary["status"] == "finished"
    assert summary["exit_reason"] == "stopped by ann"
