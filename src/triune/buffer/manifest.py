"""Manifests of exports: what was written, of what, which entries, and what was deleted since."""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import msgspec

from triune.errors import StoreError

FORMAT = 1


class Redaction(msgspec.Struct, frozen=True, kw_only=True):
    """A later deletion: these entries are still in the exported files, and must not be used."""

    at_s: float
    by: str
    entries: list[str]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What an export holds.

    Attributes:
        kind: `jsonl`, `parquet` or `dataset`.
        store: Where the entries are from.
        runs: Names of the runs that made them.
        filter: Which entries; "" = all.
        num_records: Sequences, pairs or texts.
        files: Relative name → sha256.
        entries: Entry → content hash of each of its records.
    """

    kind: str
    store: str
    filter: str
    made_by: str
    at_s: float
    num_entries: int
    num_records: int
    runs: list[str]
    files: dict[str, str]
    entries: dict[str, list[str]]
    redactions: list[Redaction] = []
    format: int = FORMAT

    @property
    def redacted(self) -> set[str]:
        """Entries that were deleted since."""
        return {entry for redaction in self.redactions for entry in redaction.entries}


def manifest_path(export: Path) -> Path:
    """Beside a file, inside a folder."""
    return export / "manifest.json" if export.is_dir() else export.with_name(export.name + ".manifest.json")


class ManifestWriter:
    """Collects an export's entries in a file as they pass, so that they need not be in memory."""

    def __init__(self, partial: Path) -> None:
        self.partial, self.num_entries, self.num_records = partial, 0, 0
        self.runs: dict[str, None] = {}
        self._file: TextIO = partial.open("w", encoding="utf-8")
        self._file.write('{"entries": {')

    def add(self, entry: str, run: str, hashes: Sequence[str]) -> None:
        """One exported entry."""
        comma = ",\n" if self.num_entries else "\n"
        self._file.write(f"{comma}{json.dumps(entry)}: {json.dumps(list(hashes))}")
        self.num_entries += 1
        self.num_records += len(hashes)
        self.runs[run] = None

    def finish(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Write the rest of it and move it to where it belongs."""
        from triune import __version__

        rest = {
            **facts,
            "format": FORMAT,
            "made_by": f"triune {__version__}",
            "at_s": time.time(),
            "num_entries": self.num_entries,
            "num_records": self.num_records,
            "runs": list(self.runs),
            "redactions": [],
        }
        self._file.write("\n},\n" + json.dumps(rest, indent=1, ensure_ascii=False)[2:] + "\n")
        self._file.close()
        self.partial.replace(path)

    def abandon(self) -> None:
        """Leave nothing behind; after `finish` it changes nothing."""
        self._file.close()
        self.partial.unlink(missing_ok=True)


def read_manifest(path: Path) -> Manifest | None:
    """The manifest at a path; None when there is none.

    Raises:
        StoreError: It is none of ours, or cannot be read.
    """
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise StoreError(
            str(path), f"no manifest of an export ({error})", "one that `triune buffer export` wrote", "export again"
        ) from error


def note_redaction(path: Path, entries: Collection[str], by: str) -> int:
    """Write into a manifest which of its entries were deleted; their number.

    Raises:
        StoreError: It cannot be read or written.
    """
    manifest = read_manifest(path)
    if manifest is None:
        return 0
    gone = sorted(manifest.entries.keys() & set(entries) - manifest.redacted)
    if gone:
        note = Redaction(at_s=time.time(), by=by, entries=gone)
        plain = msgspec.structs.replace(manifest, redactions=[*manifest.redactions, note])
        partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.partial")  # others may write it too
        try:
            partial.write_bytes(msgspec.json.format(msgspec.json.encode(plain), indent=1))
            partial.replace(path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise StoreError(
                str(path), f"cannot be written ({error})", "a writable manifest", "run gc again"
            ) from error
    return len(gone)


def hash_file(path: Path) -> str:
    """sha256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_files(export: Path, manifest: Manifest) -> None:
    """Raise StoreError where a file is not the one that was exported."""
    folder = export if export.is_dir() else export.parent
    for name, wanted in manifest.files.items():
        path = folder / name
        found = hash_file(path) if path.is_file() else "no such file"
        if found != wanted:
            raise StoreError(
                str(path),
                f"sha256 {found[:16]}",
                f"{wanted[:16]}, as its manifest says",
                "export it again, or remove the manifest to take the file as it is",
            )


def deleted_since(export: Path) -> set[str]:
    """Entries of an export that were deleted since, so that they must not be used; none where it has no manifest.

    Raises:
        StoreError: A file is not the one that was exported, or the manifest cannot be read.
    """
    manifest = read_manifest(manifest_path(export))
    if manifest is None:
        return set()
    check_files(export, manifest)
    return manifest.redacted
