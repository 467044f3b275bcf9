"""One tiny model and one task file for all real runs; every test has its own folder of runs."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import triune
from triune.failpoints import arm_failpoints
from triune.testing.run_files import save_run_file, small_run


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model and the tasks are."""
    folder = tmp_path_factory.mktemp("small")
    small_run(folder)
    return folder


class Bench:
    """Starts small runs in this process and reads what they left.

    Attributes:
        runs: Folder of the runs.
    """

    def __init__(self, shared: Path, tmp_path: Path) -> None:
        self.shared, self.folder, self.runs = shared, tmp_path, tmp_path / "runs"

    def config(self, name: str = "small", **sections: Any) -> dict[str, Any]:
        """A mapping for `triune.run`."""
        return small_run(self.shared, name=name, runs_dir=str(self.runs), **sections)

    def file(self, name: str = "small", **sections: Any) -> Path:
        """The same as a run file."""
        return save_run_file(self.config(name, **sections), self.folder / f"{name}.yaml")

    def run(self, name: str = "small", *, options: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
        """Run to the end with a reward that is seldom flat; the summary."""
        config = self.config(name, **sections)
        given = {"reward": varied} if "reward" in config["tasks"] else {}
        return triune.run(config, **{**given, **(options or {})})

    def rows(self, name: str = "small", role: str = "trainer") -> list[dict[str, Any]]:
        """Rows of a role in `metrics.jsonl`."""
        lines = (self.runs / name / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if row["role"] == role]

    def steps(self, name: str = "small", role: str = "trainer") -> list[dict[str, Any]]:
        """The last row of every step above 0, without what the clock decides."""
        found: dict[int, dict[str, Any]] = {}
        for row in self.rows(name, role):
            timeless = {key: value for key, value in row.items() if "time" not in key and key not in CLOCKED}
            if row["step"] > 0 and "num_parameters" not in row:
                found[row["step"]] = timeless
        return [found[step] for step in sorted(found)]

    def summary(self, name: str = "small") -> dict[str, Any]:
        return json.loads((self.runs / name / "summary.json").read_text())

    def weights(self, name: str = "small") -> bytes:
        """Bytes of the exported weights."""
        return (self.runs / name / "export" / "model.safetensors").read_bytes()


CLOCKED = ("idle_ratio", "tokens_per_s")


def varied(task: Any, answer: str) -> float:
    """A reward that says something about any answer of a random model."""
    return float(zlib.crc32(answer.encode()) % 2)


@pytest.fixture
def bench(shared: Path, tmp_path: Path) -> Bench:
    return Bench(shared, tmp_path)


@pytest.fixture
def failpoints() -> Iterator[Callable[[str], None]]:
    """Arm failpoints for a while: `failpoints("trainer.publish.after:3:raise")`."""
    yield arm_failpoints
    arm_failpoints("")
