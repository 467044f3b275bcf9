"""Files of task sets: found, named when missing, hashed."""

from __future__ import annotations

import difflib
import glob
import hashlib
from pathlib import Path

from triune.errors import TaskError


def find_files(path: str, where: str) -> list[Path]:
    """The files that `path` names: one file, or a glob in sorted order.

    Raises:
        TaskError: There is none; proposes the nearest name beside it.
    """
    if Path(path).is_file():
        return [Path(path)]
    found = sorted(Path(name) for name in glob.glob(path, recursive=True) if Path(name).is_file())
    if found:
        return found
    folder = Path(path).parent
    if not folder.is_dir():
        raise TaskError(where, f"no file {path}", "", f"there is no folder {folder} (seen from {Path.cwd()})")
    beside = [entry.name for entry in folder.iterdir()]
    near = difflib.get_close_matches(Path(path).name, beside, n=1)
    do = f"did you mean {folder / near[0]}?" if near else f"nothing in {folder.resolve()} matches"
    raise TaskError(where, f"no file {path}", "a file, or a glob of files", do)


def hash_files(paths: list[Path]) -> str:
    """Hash over the bytes of all files, in order; their names and times do not count."""
    total = hashlib.blake2b(digest_size=16)
    for path in paths:
        with path.open("rb") as stream:
            total.update(hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).digest())
    return total.hexdigest()
