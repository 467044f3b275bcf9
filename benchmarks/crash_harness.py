"""Starts the real command line, kills it, resumes it, and checks that nothing was lost and nothing trained twice.

What was trained is read from three sources that must agree: the store's uses, the checkpoint on disk, and a diary that
the trainer's sampling writes for itself (`crash_plugin.Diary`), of which only the batches on the surviving line count.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from triune.buffer import BufferSettings, open_buffer
from triune.monitor.history import surviving_rows
from triune.records import GroupId
from triune.testing.run_files import save_run_file, small_run
from triune.trainer import Checkpoints

PLUGIN = Path(__file__).with_name("crash_plugin.py")
LIMIT_S = 240.0
"""How long a process may take to the end of its run before the campaign calls it hung."""

STEPS, TASKS_PER_STEP, NUM_TASKS = 8, 4, 48

FAILPOINTS = (
    "buffer.put.inside:6",
    "buffer.admit.inside:3",
    "buffer.ack.inside:2",
    "trainer.publish.after:3",
    "trainer.checkpoint.after_rename:1",
    "trainer.checkpoint.before_rename:1",
    "explorer.swap.mid:2",
    "buffer.commit_version.inside:2",
)
"""Places in the program, and at which pass of them the process is killed."""


class Broken(AssertionError):
    """Something was lost, doubled or hung; the message says what, and where the folder and log are."""


def campaign_config(folder: Path, *, channel: str = "memory", **sections: Any) -> dict[str, Any]:
    """Eight steps of four tasks, two rollouts each, a checkpoint every other step."""
    base: dict[str, Any] = {
        "plugins": [str(PLUGIN)],
        "tasks": {"workflow": "unhurried", "reward": None},
        "algorithm": {"sampling": {"use": "diary", "path": str(folder / "diary.jsonl")}},
        "explorer": {"runner": "inline", "max_tokens": 4},
        "trainer": {"steps": STEPS, "tasks_per_step": TASKS_PER_STEP, "save_every": 2},
        "sync": {"channel": channel},
        "buffer": {"lease_s": 6.0},
    }
    return small_run(folder, num_tasks=NUM_TASKS, **{**base, **sections})


@dataclass
class Flight:
    """One run in a folder of its own, through all its processes.

    Attributes:
        folder: Holds the run file, the run and the logs.
        bases: Step of the newest checkpoint at the start of each process that trains.
        kills: What was killed, for the report.
    """

    folder: Path
    config: dict[str, Any]
    bases: list[tuple[int, int]] = field(default_factory=list)
    kills: list[str] = field(default_factory=list)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __enter__(self) -> Flight:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            stop(process)

    def __post_init__(self) -> None:
        save_run_file(self.config, self.folder / "run.yaml")
        self.run_dir = self.folder / "runs" / self.config["name"]
        self.store = self.run_dir / "buffer.sqlite"
        self.checkpoints = Checkpoints(self.run_dir / "checkpoints", keep=None)

    # ---- processes

    def start(self, command: str, failpoints: str = "") -> subprocess.Popen[bytes]:
        """Start `triune COMMAND`, resumed where there is something to resume."""
        words = [str(Path(sys.executable).with_name("triune")), command, str(self.folder / "run.yaml")]
        if command != "explore" and (self.run_dir / "run.resolved.json").exists():
            words.append("--resume")
        log = self.folder / f"{len(self.processes) + 1:02d}-{command}.log"
        environment = {**os.environ, "TRIUNE_FAILPOINT": failpoints, "OMP_NUM_THREADS": "1"}
        base = self.last_step()
        with log.open("wb") as out:
            process = subprocess.Popen(words, stdout=out, stderr=out, env=environment, start_new_session=True)
        self.processes.append(process)
        if command != "explore":
            self.bases.append((process.pid, base))
        return process

    def start_amending(self, failpoints: str) -> subprocess.Popen[bytes]:
        """Start a process that amends what the trainer holds."""
        words = [sys.executable, "-m", "benchmarks.crash_amend", str(self.run_dir)]
        environment = {**os.environ, "TRIUNE_FAILPOINT": failpoints}
        with (self.folder / "amend.log").open("wb") as out:
            process = subprocess.Popen(words, stdout=out, stderr=out, env=environment, start_new_session=True)
        self.processes.append(process)
        return process

    def last_step(self) -> int:
        """Step of the newest complete checkpoint; 0 when there is none."""
        return max(self.checkpoints.steps(), default=0)

    def kill(self, process: subprocess.Popen[bytes], why: str) -> bool:
        """SIGKILL a process with everything it started; False when it had ended by itself."""
        was_alive = process.poll() is None
        stop(process)
        if was_alive:
            self.kills.append(why)
            self.check_store()
        return was_alive

    def until_killed(self, process: subprocess.Popen[bytes], name: str) -> None:
        """Wait until a failpoint has killed the process."""
        code = wait(process, self)
        if code != -signal.SIGKILL:
            raise Broken(f"{name} never fired (exit {code}); {self.where()}")
        stop(process)
        self.kills.append(name)
        self.check_store()

    def finish(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for a good end."""
        code = wait(process, self)
        if code != 0:
            raise Broken(f"{process.args} ended with exit code {code}; {self.where()}")

    def where(self) -> str:
        """Folder, and the last lines of the newest log."""
        logs = sorted(self.folder.glob("*.log"))
        tails = [f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-12:]) for log in logs]
        return f"see {self.folder}, kills: {', '.join(self.kills) or 'none'}\n" + "\n".join(tails[-3:])

    # ---- progress, seen from outside

    def events(self) -> int:
        """Puts, granted uses, versions and acknowledgements so far; -1 before there is a store."""
        try:
            with closing(sqlite3.connect(f"file:{self.store}?mode=ro", uri=True, timeout=5)) as connection:
                row = connection.execute(
                    "SELECT (SELECT total(value) FROM counters WHERE name = 'puts' OR name LIKE 'granted/%') + "
                    "(SELECT count(*) FROM versions WHERE state != 'reserved') + (SELECT count(*) FROM admissions) + "
                    "(SELECT count(*) FROM uses WHERE state = 'acked')"
                ).fetchone()
                return int(row[0])
        except sqlite3.Error:
            return -1

    def wait_for_events(self, num: int, *processes: subprocess.Popen[bytes]) -> bool:
        """Wait until so many have happened; False when one of the processes ended first."""
        deadline = time.monotonic() + LIMIT_S
        while self.events() < num:
            if any(process.poll() is not None for process in processes):
                return False
            if time.monotonic() > deadline:
                raise Broken(f"nothing happens any more at event {self.events()} of {num}; {self.where()}")
            time.sleep(0.02)
        return True

    # ---- checks

    def check_store(self) -> dict[str, float]:
        """The conservation law, between any two processes."""
        if not self.store.exists():
            return {}

        async def look() -> dict[str, float]:
            buffer = open_buffer(BufferSettings(), self.run_dir)
            try:
                await buffer.check_conservation()
                return dict(await buffer.stats())
            finally:
                await buffer.close()

        return asyncio.run(look())

    def check_finished(self) -> Counter[str]:
        """All laws at the end; the multiset of trained task keys."""
        stats = self.check_store()
        if stats["uses/leased"] or stats["open"]:
            raise Broken(f"left over: {stats['uses/leased']:.0f} leases, {stats['open']:.0f} open; {self.where()}")
        summary = json.loads((self.run_dir / "summary.json").read_text())
        if summary["status"] != "finished" or summary["steps"] != STEPS:
            raise Broken(f"summary says {summary['status']} after {summary['steps']} steps; {self.where()}")
        self.check_rows()
        trained = self.surviving_uses()
        doubled = [use for use, number in Counter(trained).items() if number > 1]
        if doubled:
            raise Broken(f"trained twice on one line: {doubled}; {self.where()}")
        acked = self.acknowledged_uses()
        if acked != Counter(trained):
            raise Broken(f"acknowledged but not trained, or the reverse: {acked} and {trained}; {self.where()}")
        return Counter(GroupId.parse(entry).task_key for entry, _ in trained)

    def check_rows(self) -> None:
        """Every step has its row in `metrics.jsonl`, on the line that survived."""
        rows = [row for row in surviving_rows(self.run_dir / "metrics.jsonl") if row["role"] == "trainer"]
        there = {row["step"] for row in rows if "loss" in row}
        if there != set(range(1, STEPS + 1)):
            raise Broken(f"metrics.jsonl has the trainer's rows of steps {sorted(there)}; {self.where()}")

    def acknowledged_uses(self) -> Counter[tuple[str, int]]:
        """(entry, use number) of every acknowledged use."""
        with closing(sqlite3.connect(self.store)) as connection:
            rows = connection.execute(
                "SELECT e.entry, u.use_no FROM uses u JOIN entries e ON e.seq = u.entry WHERE u.state = 'acked'"
            ).fetchall()
        return Counter((entry, use_no) for entry, use_no in rows)

    def surviving_uses(self) -> list[tuple[str, int]]:
        """What the diary says was trained on, without the batches of lost steps."""
        batches: dict[int, list[list[Any]]] = {}
        for line in (self.folder / "diary.jsonl").read_text().splitlines():
            page = json.loads(line)
            if page["uses"]:
                batches.setdefault(page["pid"], []).append(page["uses"])
        found: list[tuple[str, int]] = []
        ends = [base for _, base in self.bases[1:]] + [STEPS]
        for (pid, base), end in zip(self.bases, ends, strict=True):
            survived = batches.get(pid, [])[: max(0, end - base)]
            if len(survived) < end - base:
                raise Broken(f"steps {base + 1}–{end} survive but only {len(survived)} were trained; {self.where()}")
            found += [(entry, use_no) for uses in survived for entry, use_no, _ in uses]
        return found


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the whole process group, then reap."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


def wait(process: subprocess.Popen[bytes], flight: Flight) -> int:
    """Exit code; a process that does not end is killed and named."""
    try:
        return process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        stop(process)
        raise Broken(f"{process.args} hangs after {LIMIT_S:.0f} s; {flight.where()}") from None


# ------------------------------------------------------------------------------------------------- scenarios


def uninterrupted(folder: Path, **sections: Any) -> Counter[str]:
    """Trained task keys of a run that nobody kills."""
    with Flight(folder, campaign_config(folder, **sections)) as flight:
        flight.finish(flight.start("run"))
        return flight.check_finished()


def killed_at_failpoints(folder: Path, names: Sequence[str], **sections: Any) -> tuple[Flight, Counter[str]]:
    """One run, killed at each failpoint in turn, resumed after each, then left to finish."""
    with Flight(folder, campaign_config(folder, **sections)) as flight:
        for name in names:
            flight.until_killed(flight.start("run", name), name)
        flight.finish(flight.start("run"))
        return flight, flight.check_finished()


def killed_while_amending(folder: Path, **sections: Any) -> tuple[Flight, Counter[str]]:
    """One run, beside a process that dies while it amends what the trainer has leased."""
    with Flight(folder, campaign_config(folder, **sections)) as flight:
        process = flight.start("run")
        flight.wait_for_events(10, process)
        flight.until_killed(flight.start_amending("buffer.amend.leased:1"), "buffer.amend.leased:1")
        flight.finish(process)
        return flight, flight.check_finished()


def killed_at_random(folder: Path, num: int, chance: random.Random, **sections: Any) -> tuple[Flight, Counter[str]]:
    """`triune run`, killed `num` times at random moments."""
    with Flight(folder, campaign_config(folder, **sections)) as flight:
        for _ in range(num):
            process = flight.start("run")
            _kill_at_random(flight, process, num, chance, process)
        flight.finish(flight.start("run"))
        return flight, flight.check_finished()


def one_of_two_killed(
    folder: Path, victim: str, num: int, chance: random.Random, **sections: Any
) -> tuple[Flight, Counter[str]]:
    """`triune train` and `triune explore` beside each other; `victim` is killed `num` times and started again."""
    with Flight(folder, campaign_config(folder, channel="files", **sections)) as flight:
        pair = {name: flight.start(name) for name in ("train", "explore")}
        for _ in range(num):
            _kill_at_random(flight, pair[victim], num, chance, *pair.values())
            if pair[victim].returncode != -signal.SIGKILL:
                break  # it had ended before
            pair[victim] = flight.start(victim)
        for process in pair.values():
            flight.finish(process)
        return flight, flight.check_finished()


def _kill_at_random(
    flight: Flight, victim: subprocess.Popen[bytes], num: int, chance: random.Random, *watched: subprocess.Popen[bytes]
) -> None:
    """Mostly after some more events and a few milliseconds, sometimes in the middle of starting or resuming."""
    if chance.random() < 0.2:
        moment = chance.uniform(0.5, 6.0)
        time.sleep(moment)
        why = f"{moment:.1f} s after its start"
    else:
        before = max(0, flight.events())
        more = chance.randint(1, max(8, 130 // num))
        flight.wait_for_events(before + more, *watched)
        time.sleep(chance.uniform(0, 0.15))
        why = f"at event {before + more}"
    flight.kill(victim, why)
