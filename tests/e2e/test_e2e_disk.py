"""A disk that fills up: the run ends and says so, and goes on where it was once there is room."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from triune.buffer import BufferSettings, open_buffer
from triune.cli.boundary import run as command_line


class Disk:
    """A file system of a chosen size."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def resize(self, size: str) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", str(self.folder)], check=True)


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


async def conserved(folder: Path) -> dict[str, int]:
    buffer = open_buffer(BufferSettings(), folder)
    try:
        return dict(await buffer.check_conservation())
    finally:
        await buffer.close()


@pytest.mark.parametrize("size", ["200k", "600k", "1100k"])  # of the store, of a version or of the second checkpoint
def test_a_full_disk_ends_the_run_with_its_name_and_a_resume_goes_on(bench: Any, disk: Disk, capsys: Any, size: str):
    disk.resize(size)
    runs = disk.folder / "runs"
    file = str(
        bench.file(tasks={"reward": "last_number"}, trainer={"steps": 8, "save_every": 2}, sync={"channel": "files"})
    )
    code = command_line(["run", file, f"runs_dir={runs}"])
    said = capsys.readouterr().err
    assert code == 1
    assert "found:" in said
    assert "No space left" in said or "disk is full" in said
    assert "Traceback" not in said
    disk.resize("64m")
    begun = (runs / "small" / "buffer.sqlite").exists()
    code = command_line(["run", file, f"runs_dir={runs}", *(["--resume"] if begun else [])])
    assert code == 0, capsys.readouterr().err
    found = asyncio.run(conserved(runs / "small"))
    assert found["entries/spent"] == 8 * 4


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
