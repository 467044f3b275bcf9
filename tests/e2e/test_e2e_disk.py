"""A disk that fills up: the run ends and says so, and goes on where it was once there is room."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import triune
import triune.buffer
from triune.cli.boundary import run as command_line
from triune.testing.run_files import small_run
from triune.trainer import Trainer

STEPS = 8
SECTIONS: dict[str, Any] = {
    "deterministic": True,
    "tasks": {"reward": {"use": "format", "pattern": ".*[a-m].*"}},
    "trainer": {"steps": STEPS, "save_every": 2},
    "sync": {"channel": "files"},
}


class Disk:
    """A file system of a chosen size."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def resize(self, size: str) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", str(self.folder)], check=True)

    def fill(self) -> None:
        with suppress(OSError), (self.folder / "filler").open("wb") as file:
            while True:
                file.write(b"-" * 4096)

    def make_room(self) -> None:
        (self.folder / "filler").unlink(missing_ok=True)
        self.resize("64m")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip("no right to mount; test_a_file_that_may_not_grow covers the rest")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def trained(run_dir: Path) -> list[list[str]]:
    """What each step was trained on; the store must be sound."""
    with triune.buffer.open(run_dir) as opened:
        assert opened.verify().findings == ()
        return [sorted(use.entry for use in opened.step(number)) for number in range(1, STEPS + 1)]


def weights(run_dir: Path) -> bytes:
    return (run_dir / "export" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a disk with room."""
    folder = tmp_path_factory.mktemp("whole")
    triune.run(small_run(shared, runs_dir=str(folder), **SECTIONS))  # type: ignore[arg-type]
    assert weights(folder / "small") != (shared / "model" / "model.safetensors").read_bytes()
    return folder / "small"


def is_full(bench: Any, disk: Disk, capsys: Any) -> str:
    """Run until the disk is full; the run file."""
    file = str(bench.file(**SECTIONS))
    code = command_line(["run", file, f"runs_dir={disk.folder / 'runs'}"])
    said = capsys.readouterr().err
    assert code == 1
    assert "found:" in said
    assert "No space left" in said or "disk is full" in said
    assert "Traceback" not in said
    return file


def goes_on(file: str, disk: Disk, capsys: Any, whole: Path) -> None:
    """With room again, it ends as if there had always been room."""
    disk.make_room()
    run_dir = disk.folder / "runs" / "small"
    begun = (run_dir / "buffer.sqlite").exists()
    code = command_line(["run", file, f"runs_dir={run_dir.parent}", *(["--resume"] if begun else [])])
    assert code == 0, capsys.readouterr().err
    assert trained(run_dir) == trained(whole)
    assert weights(run_dir) == weights(whole)


@pytest.mark.parametrize("size", ["200k", "600k", "1100k"])  # of the store, or of what the first steps write
def test_a_full_disk_ends_the_run_with_its_name_and_a_resume_ends_as_if_there_had_been_room(
    bench: Any, whole: Path, disk: Disk, capsys: Any, size: str
):
    disk.resize(size)
    file = is_full(bench, disk, capsys)
    goes_on(file, disk, capsys, whole)


def test_a_disk_that_fills_up_behind_a_checkpoint_lets_a_resume_end_as_if_there_had_been_room(
    bench: Any, whole: Path, disk: Disk, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    real = Trainer.save

    async def save(self: Trainer) -> Path:
        path = await real(self)
        disk.fill()
        return path

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "save", save)
        file = is_full(bench, disk, capsys)
    assert [path.name for path in disk.folder.glob("runs/small/checkpoints/step-*")] == ["step-00000002"]
    goes_on(file, disk, capsys, whole)


@pytest.mark.slow
def test_a_file_that_may_not_grow_any_more_ends_the_run_with_its_name(bench: Any, tmp_path: Path):
    file = bench.file(tasks={"reward": "last_number"}, trainer={"steps": 40, "save_every": 2})
    command = f"ulimit -f 300; exec {Path(sys.executable).with_name('triune')} run {file}"
    ended = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=110, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert ended.returncode == 1, ended.stderr
    assert "buffer.sqlite" in ended.stderr
    assert "found:" in ended.stderr
    assert bench.summary()["status"] == "failed"
