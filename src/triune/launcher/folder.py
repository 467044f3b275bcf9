"""The folder of a run: who may write to it, and what is in it.

runs/<name>/
  run.resolved.json   every value with its origin
  buffer.sqlite       everything experienced
  weights/            versions of the file channel (two-process runs)
  checkpoints/        atomic, for an exact resume
  metrics.jsonl       one object a line with `step` and `role`
  eval.jsonl          one row per task and version
  summary.json        status, steps, first and last value of the main metrics, exit reason
  curve.png, export/, plugins/, logs/
"""

from __future__ import annotations

import fcntl
import json
import os
from enum import StrEnum
from pathlib import Path
from typing import IO

from triune.errors import ConfigError, StoreError


class Start(StrEnum):
    """What to do when the folder already holds a run."""

    NEW = "new"
    RESUME = "resume"
    RESTART = "restart"


class RunFolder:
    """One run's folder, locked per role for as long as this process uses it.

    A folder with a run in it is never written to by accident: a new run needs a new name, `--resume` goes on, and
    `--restart` moves the old folder aside (it is an asset; nothing is deleted).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._locks: list[IO[str]] = []

    @classmethod
    def open(cls, runs_dir: str | os.PathLike[str], name: str, start: Start, *, roles: tuple[str, ...]) -> RunFolder:
        """Make or enter `runs_dir/name` and lock it for `roles`.

        Raises:
            ConfigError: The folder holds a run and `start` is new, or holds none and `start` is resume.
            StoreError: The folder cannot be written, or another process has one of the roles.
        """
        folder = cls(Path(runs_dir) / name)
        holds_run = (folder.path / "run.resolved.json").exists()
        if holds_run and start is Start.NEW and folder.has_begun:
            raise ConfigError(
                str(folder.path),
                f"holds a run already ({folder.describe()})",
                "an empty place for a new run",
                "continue it with --resume, begin again with --restart (the old folder is kept), or set name=…",
            )
        if not holds_run and start is Start.RESUME:
            raise ConfigError(
                str(folder.path), "no run to resume", "a folder with run.resolved.json", "leave out --resume"
            )
        try:
            if holds_run and start is Start.RESTART:
                folder._lock(roles)
                folder.release()
                folder.path.rename(folder._aside())
            folder.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                str(folder.path), f"cannot be written ({error.strerror})", "", "choose another runs_dir"
            ) from error
        folder._lock(roles)
        return folder

    @classmethod
    def join(cls, runs_dir: str | os.PathLike[str], name: str, *, role: str) -> RunFolder:
        """Enter the folder beside another process of the same run; several explorers may share it."""
        folder = cls(Path(runs_dir) / name)
        folder.path.mkdir(parents=True, exist_ok=True)
        if role != "explorer":
            folder._lock((role,))
        return folder

    @property
    def has_begun(self) -> bool:
        """Whether the run came far enough to leave anything: one that could not even begin may be tried again."""
        left = ("buffer.sqlite", "metrics.jsonl", "checkpoints")
        return any((folder / name).exists() for folder in (self.path, *self.path.glob("[0-9]*-*")) for name in left)

    def describe(self) -> str:
        """`finished, 120 steps`, read from the summary; `unfinished` when there is none."""
        try:
            summary = json.loads((self.path / "summary.json").read_text())
        except (OSError, ValueError):
            return "unfinished"
        return f"{summary.get('status', 'unfinished')}, {summary.get('steps', 0)} steps"

    def release(self) -> None:
        """Give the locks back."""
        for lock in self._locks:
            lock.close()
        self._locks.clear()

    def _aside(self) -> Path:
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        return aside

    def _lock(self, roles: tuple[str, ...]) -> None:
        if not self.path.exists():
            return
        for role in roles:
            lock = (self.path / f".{role}.lock").open("w")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                self.release()
                raise StoreError(
                    str(self.path),
                    f"another process is the {role} of this run",
                    "one at a time",
                    "stop it first, or set name=…",
                ) from None
            self._locks.append(lock)
