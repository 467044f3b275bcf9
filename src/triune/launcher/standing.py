"""How far a run came in its folder: what a command that makes several runs still has to do."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Any

from triune.config import RunConfig, check_same_run
from triune.launcher.folder import RunFolder, Start


class Standing(StrEnum):
    """What a run's folder holds."""

    NEW = "new"
    BEGUN = "begun"
    FINISHED = "finished"

    @property
    def start(self) -> Start:
        """How to go on."""
        return Start.NEW if self is Standing.NEW else Start.RESUME


def standing(config: RunConfig, *, allow_changes: bool = False) -> Standing:
    """Look at the folder of a run.

    A finished run whose `trainer.steps` were raised since is one that has begun: a resume goes on with it.

    Raises:
        CheckpointError: It was begun with settings that a resume may not change.
    """
    folder = config.run_dir
    if not (folder / "run.resolved.json").exists() or not RunFolder(folder).has_begun:
        return Standing.NEW
    if not allow_changes:
        check_same_run(config, folder)
    summary = read_summary(folder)
    if summary.get("status") != "finished":
        return Standing.BEGUN
    wanted = config.trainer.steps
    is_enough = summary.get("steps_wanted") == wanted or (wanted is not None and summary.get("steps", 0) >= wanted)
    return Standing.FINISHED if is_enough else Standing.BEGUN


def read_summary(folder: Path) -> dict[str, Any]:
    """`summary.json` of a run; empty when it has none, or none that can be read."""
    try:
        return json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
