"""One run of the crash campaign through all its processes: the real command line, started, killed, started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.crash_checks import Broken, check_finished, check_store
from triune.testing.run_files import save_run_file, small_run
from triune.trainer import Checkpoints

Process = subprocess.Popen[bytes]

TRIUNE = Path(sys.executable).with_name("triune")
PLUGIN = Path(__file__).with_name("crash_plugin.py")
LIMIT_S = 180.0
"""How long a process may take to the end of its run before the campaign calls it hung."""

STEPS, TASKS_PER_STEP, NUM_TASKS = 8, 4, 48

FILE: Mapping[str, Any] = {"use": "sqlite"}
"""The store in the run's folder."""


def campaign_config(
    folder: Path, *, store: Mapping[str, Any] = FILE, channel: str = "memory", **sections: Any
) -> dict[str, Any]:
    """Eight steps of four tasks, two rollouts each, a checkpoint every other step."""
    base: dict[str, Any] = {
        "plugins": [str(PLUGIN)],
        "tasks": {"workflow": "unhurried", "reward": None},
        "algorithm": {"sampling": {"use": "diary", "path": str(folder / "diary.jsonl")}},
        "explorer": {"runner": "inline", "max_tokens": 4},
        "trainer": {"steps": STEPS, "tasks_per_step": TASKS_PER_STEP, "save_every": 2},
        "sync": {"channel": channel},
        "buffer": {"store": dict(store), "lease_s": 3.0},
    }
    return small_run(folder, num_tasks=NUM_TASKS, **{**base, **sections})


@dataclass
class Flight:
    """One run in a folder of its own.

    Attributes:
        folder: Holds the run file, the run and the logs.
        config: What the run file says.
        stage: Folder of the stage that is looked at, where the run has several.
        bases: Process and step of the newest checkpoint at its start, of each process that trains.
        kills: What was killed and when, for the report.
    """

    folder: Path
    config: dict[str, Any]
    stage: str = ""
    bases: list[tuple[int, int]] = field(default_factory=list)
    kills: list[str] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)

    def __enter__(self) -> Flight:
        return self

    def __exit__(self, *error: object) -> None:
        stop(*(process for process in self.processes if process.poll() is None))

    def __post_init__(self) -> None:
        save_run_file(self.config, self.folder / "run.yaml")
        self.whole_dir = self.folder / "runs" / self.config["name"]
        self.run_dir = self.whole_dir / self.stage
        self.checkpoints = Checkpoints(self.run_dir / "checkpoints", keep=None)
        self._began = self.folder / "began"
        self._began.mkdir()

    # ---- processes

    def start(self, command: str, failpoints: str = "") -> Process:
        """Start `triune COMMAND`, resumed where there is something to resume."""
        words = [str(TRIUNE), command, str(self.folder / "run.yaml")]
        if command != "explore" and (self.whole_dir / "run.resolved.json").exists():
            words.append("--resume")
        base = self.last_step()
        process = self._spawn(command, words, failpoints)
        if command != "explore":
            self.bases.append((process.pid, base))
        return process

    def start_amending(self, failpoints: str) -> Process:
        """Start a process that amends what the trainer holds."""
        return self._spawn("amend", [sys.executable, "-m", "benchmarks.crash_amend", str(self.run_dir)], failpoints)

    def start_clearing(self, failpoints: str) -> Process:
        """Start a process that frees what nobody refers to in the buffer's segments."""
        words = [str(TRIUNE), "buffer", "gc", str(self.run_dir), "--segments", "--yes"]
        return self._spawn("clear", words, failpoints)

    def _spawn(self, name: str, words: list[str], failpoints: str) -> Process:
        mine = {"TRIUNE_FAILPOINT": failpoints, "TRIUNE_CRASH_BEGAN": str(self._began), "OMP_NUM_THREADS": "1"}
        with self.log_of(len(self.processes) + 1, name).open("wb") as out:
            process = subprocess.Popen(
                words, stdout=out, stderr=out, env={**os.environ, **mine}, start_new_session=True
            )
        self.processes.append(process)
        return process

    def log_of(self, number: int, name: str) -> Path:
        """What the process of that number says."""
        return self.folder / f"{number:02d}-{name}.log"

    def said(self, process: Process) -> str:
        """What a process has said so far."""
        number = self.processes.index(process) + 1
        return next(self.folder.glob(f"{number:02d}-*.log")).read_text(errors="replace")

    def last_step(self) -> int:
        """Step of the newest complete checkpoint; 0 when there is none."""
        return max(self.checkpoints.steps(), default=0)

    def kill(self, why: str, *victims: Process) -> None:
        """SIGKILL processes with everything they started, at once; then the store must obey its law."""
        stop(*victims)
        self.note_kill(why)

    def note_kill(self, why: str) -> None:
        """Write down what was killed, and look whether the store obeys its law."""
        self.kills.append(why)
        check_store(self.run_dir)

    def until_killed(self, process: Process, name: str) -> None:
        """Wait until a failpoint has killed the process."""
        code = self.wait(process)
        if code != -signal.SIGKILL:
            raise Broken(f"{name} never fired (exit {code}); {self.where()}")
        self.kill(name, process)

    def finish(self, *processes: Process) -> None:
        """Wait for a good end."""
        for process in processes:
            code = self.wait(process)
            if code != 0:
                raise Broken(f"{process.args} ended with exit code {code}; {self.where()}")

    def wait(self, process: Process, limit_s: float = LIMIT_S) -> int:
        """Exit code; a process that does not end is killed and named."""
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            stop(process)
            raise Broken(f"{process.args} hangs after {limit_s:.0f} s; {self.where()}") from None

    # ---- moments

    def sleep(self, seconds: float, *watched: Process) -> bool:
        """Wait; False as soon as one of the processes has ended."""
        end = time.monotonic() + seconds
        while not (is_over := time.monotonic() >= end) and all(process.poll() is None for process in watched):
            time.sleep(min(0.01, max(0.0, end - time.monotonic())))
        return is_over

    def until_begun(self, *processes: Process) -> bool:
        """Wait until each has said that its work began; False when one ended before."""
        deadline = time.monotonic() + LIMIT_S
        while not all((self._began / str(process.pid)).exists() for process in processes):
            if any(process.poll() is not None for process in processes):
                return False
            if time.monotonic() > deadline:
                raise Broken(f"{processes[0].args} does not begin in {LIMIT_S:.0f} s; {self.where()}")
            time.sleep(0.01)
        return True

    # ---- the end

    def check(self) -> Counter[str]:
        """All laws at the end; the multiset of trained task keys."""
        try:
            return check_finished(self.run_dir, self.folder / "diary.jsonl", self.bases, STEPS)
        except Broken as broken:
            raise Broken(f"{broken}; {self.where()}") from None

    def where(self) -> str:
        """Folder, and the last lines of the newest logs."""
        logs = sorted(self.folder.glob("*.log"))
        tails = [f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-12:]) for log in logs]
        return f"see {self.folder}, kills: {', '.join(self.kills) or 'none'}\n" + "\n".join(tails[-3:])


def stop(*processes: Process) -> None:
    """SIGKILL to all the process groups, then reap."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait(10)
