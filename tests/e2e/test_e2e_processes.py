"""Runs as processes of their own: two beside each other, signals, and what a killed one leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PLUGIN = str(Path(__file__).with_name("e2e_plugin.py"))


class Processes:
    """Starts `triune …`, waits for things to be seen, and leaves nobody behind."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        command = [str(Path(sys.executable).with_name("triune")), *words]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def end(self, process: subprocess.Popen[str], timeout_s: float = 100) -> tuple[int, str]:
        """Exit code and what it said."""
        out, err = process.communicate(timeout=timeout_s)
        return process.returncode, out + err

    @staticmethod
    def wait_for(what: Callable[[], bool], *processes: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + 90
        while not what():
            ended = [process for process in processes if process.poll() is not None]
            assert not ended, f"ended too early: {ended[0].communicate()}"
            assert time.monotonic() < deadline, "it never happened"
            time.sleep(0.05)


@pytest.fixture
def processes() -> Iterator[Processes]:
    made = Processes()
    yield made
    for process in made.started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def saved(folder: Path) -> Callable[[], bool]:
    """Whether a checkpoint is complete."""
    return lambda: any((folder / "checkpoints").glob("step-*/state.json"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_explore_and_train_as_two_processes_make_one_run_with_one_summary(bench: Any, processes: Processes):
    file = str(bench.file(tasks={"reward": {"use": "format", "pattern": ".*[a-m].*"}}, sync={"channel": "files"}))
    explorer, trainer = processes.start("explore", file), processes.start("train", file)
    assert processes.end(trainer)[0] == 0
    assert processes.end(explorer)[0] == 0
    summary = bench.summary()
    assert (summary["status"], summary["steps"]) == ("finished", 3)
    assert {"reward", "loss", "grad_norm"} <= summary["metrics"].keys()
    assert Path(summary["export"]).is_dir()
    assert [row["step"] for row in bench.steps()] == [1, 2, 3]
    assert [row["step"] for row in bench.steps(role="explorer")] == [1, 2, 3]
    assert json.loads((bench.runs / "small" / "explorer.json").read_text())["status"] == "finished"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_explorers_share_the_tasks_of_a_run_and_draw_none_of_them_twice(bench: Any, processes: Processes):
    from triune.records import GroupId

    config = {"reward": {"use": "format", "pattern": ".*[a-m].*"}, "epochs": 1}
    file = str(bench.file(tasks=config, sync={"channel": "files", "max_staleness": 1}, trainer={"steps": 10}))
    started = [processes.start("train", file), processes.start("explore", file), processes.start("explore", file)]
    for process in started:
        code, said = processes.end(process)
        assert code == 0, said
    found = entries(bench.runs / "small")
    tasks = [GroupId.parse(entry).task_key for entry in found]
    assert sorted(tasks) == [f"t{n:02d}" for n in range(40)]


def entries(folder: Path) -> list[str]:
    import sqlite3

    with sqlite3.connect(folder / "buffer.sqlite") as connection:
        return [entry for (entry,) in connection.execute("SELECT entry FROM entries WHERE state = 'spent'")]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_a_run_in_order_with_130_and_it_can_be_resumed(bench: Any, processes: Processes, name: str):
    file = str(bench.file(tasks={"reward": "last_number"}, trainer={"steps": 40, "save_every": 2}))
    process = processes.start("run", file)
    processes.wait_for(saved(bench.runs / "small"), process)
    process.send_signal(getattr(signal, name))
    code, said = processes.end(process, timeout_s=30)
    assert code == 130
    assert "Traceback" not in said
    summary = bench.summary()
    assert (summary["status"], summary["exit_reason"]) == ("interrupted", name)
    assert 2 <= summary["steps"] < 40
    steps = str(summary["steps"] + 1)
    process = processes.start("run", file, f"trainer.steps={steps}", "--resume")
    code, said = processes.end(process)
    assert code == 0, said
    assert bench.summary()["steps"] == int(steps)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_runner_processes_of_a_killed_run_do_not_outlive_it(bench: Any, processes: Processes, tmp_path: Path):
    pids = tmp_path / "pids"
    pids.touch()
    file = str(bench.file(plugins=[PLUGIN], tasks={"workflow": "says_its_pid", "reward": None}, trainer={"steps": 90}))
    process = processes.start("run", file, PID_FILE=str(pids))
    processes.wait_for(lambda: len(set(pids.read_text().split())) >= 2, process)
    runners = {int(pid) for pid in pids.read_text().split()}
    assert process.pid not in runners
    os.kill(process.pid, signal.SIGKILL)  # the process alone, as the kernel's out-of-memory killer does
    process.wait()
    deadline = time.monotonic() + 15
    while any(is_alive(pid) for pid in runners):
        assert time.monotonic() < deadline, "a runner lives on"
        time.sleep(0.1)


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_explorer_says_that_its_trainer_is_gone_and_ends_when_nobody_resumes_it(
    bench: Any, processes: Processes, tmp_path: Path
):
    from triune.cli.boundary import run as command_line
    from triune.launcher import beside

    file = str(
        bench.file(
            tasks={"reward": "last_number"},
            sync={"channel": "files"},
            trainer={"steps": 1000, "save_every": 2},
            buffer={"lease_s": 1.0},
            monitor={"sinks": ["jsonl"], "heartbeat_s": 0.5},
        )
    )
    trainer = processes.start("train", file)
    processes.wait_for((bench.runs / "small" / "buffer.sqlite").exists, trainer)
    explorer = processes.start("explore", file)
    processes.wait_for(saved(bench.runs / "small"), trainer, explorer)
    os.killpg(trainer.pid, signal.SIGKILL)
    lines = bench.runs / "small" / "metrics.jsonl"
    processes.wait_for(lambda: "whose heart has stopped" in lines.read_text(), explorer)
    explorer.send_signal(signal.SIGINT)
    assert processes.end(explorer, timeout_s=30)[0] == 130
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beside, "JOIN_TIMEOUT_S", 1.0)
        assert command_line(["explore", file]) == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_explorer_follows_a_trainer_that_begins_its_run_again_in_a_new_folder(bench: Any, processes: Processes):
    file = str(
        bench.file(
            tasks={"reward": {"use": "format", "pattern": ".*[a-m].*"}},
            sync={"channel": "files"},
            trainer={"steps": 500, "save_every": 2},
        )
    )
    folder = bench.runs / "small"
    trainer = processes.start("train", file)
    processes.wait_for((folder / "buffer.sqlite").exists, trainer)
    explorer = processes.start("explore", file)
    processes.wait_for(saved(folder), trainer, explorer)
    os.killpg(trainer.pid, signal.SIGKILL)
    trainer.wait()
    trainer = processes.start("train", file, "trainer.steps=3", "--restart")
    code, said = processes.end(trainer)
    assert code == 0, said
    code, said = processes.end(explorer)
    assert code == 0, said
    assert (bench.runs / "small.1" / "buffer.sqlite").exists()
    assert [row["step"] for row in bench.steps(role="explorer")] == [1, 2, 3]
