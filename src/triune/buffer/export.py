"""Writes entries to files for people, for other tools and for other buffers, a page at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from triune.buffer.content import num_without_behaviour, record_hashes
from triune.buffer.entry_walk import walk_groups
from triune.buffer.export_notes import announce, complete, withdraw
from triune.buffer.manifest import ManifestWriter, hash_file, manifest_path
from triune.buffer.query import Filter
from triune.buffer.query_columns import EntryRow
from triune.buffer.store import Store
from triune.buffer.table_rows import table_schema, to_rows
from triune.buffer.transfer import LineWriter, to_plain
from triune.errors import ConfigError, StoreError
from triune.records import Group

JSONL, PARQUET, DATASET = "jsonl", "parquet", "dataset"

ROW_GROUP = 512
"""Rows of a table that are written together."""

Sink = Callable[[EntryRow, Group], None]


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """What was written.

    Attributes:
        num_rows: Lines of a JSONL file, rows of a table.
        num_without_behaviour: Sequences that only imitation can learn from.
    """

    kind: str
    path: str
    manifest: str
    num_entries: int
    num_records: int
    num_rows: int
    num_without_behaviour: int


def kind_of_export(out: Path) -> str:
    """By its name: `.jsonl`, `.parquet`, or a folder where it has no ending.

    Raises:
        ConfigError: Neither; or something is in the way, or its folder is missing.
    """
    kind = {".jsonl": JSONL, ".parquet": PARQUET, "": DATASET}.get(out.suffix)
    if kind is None:
        expected = "a name that ends in .jsonl or .parquet, or a folder's, which has no ending"
        raise ConfigError("buffer export", f"found {out.name!r}", expected)
    if not out.parent.is_dir():
        raise ConfigError("buffer export", f"no folder {str(out.parent)!r}", "an existing folder", "make it first")
    if out.is_dir() and (kind != DATASET or any(out.iterdir())):
        raise ConfigError(
            "buffer export", f"there is a folder {str(out)!r}", "a new name", "name another, or remove it"
        )
    if kind == DATASET and out.is_file():
        raise ConfigError("buffer export", f"there is a file {str(out)!r}", "a new name", "name another, or remove it")
    return kind


def export_entries(store: Store, wanted: Filter, out: Path, *, kind: str = "") -> Exported:
    """Write the newest revision of every entry that fits, and a manifest; entries whose records are gone are left out.

    The store knows of the export before its first entry is read, and what is deleted while it is written is marked in
    its manifest at the end.

    `.jsonl` has one entry a line, `.parquet` one sequence a row. A name without ending makes a folder as
    `datasets.load_dataset` reads it: the same rows, and a card. `kind` decides where the name is not to.

    Raises:
        ConfigError: The name says no format, or something is in the way.
        StoreError: The disk is full, or an entry is damaged; no half file is left.
    """
    kind = kind or kind_of_export(out)
    manifest = manifest_path(out) if kind != DATASET else out / "manifest.json"
    earlier = announce(store, manifest, wanted)
    try:
        done = _write(store, wanted, out, kind)
    except BaseException:
        withdraw(store, manifest, earlier)
        raise
    complete(store, manifest, done.num_entries)
    return done


def _write(store: Store, wanted: Filter, out: Path, kind: str) -> Exported:
    target = out if kind != DATASET else out.with_name(out.name + ".partial")
    num_unknown = 0
    try:
        if kind == DATASET:
            shutil.rmtree(target, ignore_errors=True)
            (target / "data").mkdir(parents=True)
        file = target / "data" / "train.parquet" if kind == DATASET else out
        notes = ManifestWriter(out.with_name(out.name + ".manifest.partial"))
        try:
            with _OPENERS[kind](file) as (write, count):
                for row, group in walk_groups(store, wanted):
                    if group.records:
                        write(row, group)
                        notes.add(row.entry, row.group.run, record_hashes(group))
                        num_unknown += num_without_behaviour(group)
            if kind == DATASET:
                (target / "README.md").write_text(_card(notes.num_entries, store.db.where), encoding="utf-8")
            name = file.relative_to(target).as_posix() if kind == DATASET else out.name
            facts = {"kind": kind, "store": store.db.where, "filter": wanted.text, "files": {name: hash_file(file)}}
            notes.finish(manifest_path(target), facts)
            if kind == DATASET:
                shutil.rmtree(out, ignore_errors=True)
                target.replace(out)
        finally:
            notes.abandon()
            if kind == DATASET:
                shutil.rmtree(target, ignore_errors=True)
    except OSError as error:
        raise StoreError(
            str(out), f"cannot be written ({error})", "a writable folder with space", "name another one"
        ) from error
    return Exported(
        kind=kind,
        path=str(out),
        manifest=str(manifest_path(out)),
        num_entries=notes.num_entries,
        num_records=notes.num_records,
        num_rows=count(),
        num_without_behaviour=num_unknown,
    )


Opened = tuple[Sink, Callable[[], int]]


@contextmanager
def _open_lines(path: Path) -> Iterator[Opened]:
    with LineWriter(path) as lines:

        def write(row: EntryRow, group: Group) -> None:
            names = ("entry", "buffer", "state", "reason", "revision")
            lines.write({**{name: getattr(row, name) for name in names}, "group": to_plain(group)})

        yield write, lambda: lines.number


@contextmanager
def _open_table(path: Path) -> Iterator[Opened]:
    import pyarrow as arrow
    from pyarrow import parquet

    schema, partial = table_schema(), path.with_name(path.name + ".partial")
    waiting: list[Mapping[str, Any]] = []
    number = 0

    def flush() -> None:
        nonlocal number
        number += len(waiting)
        writer.write_table(arrow.Table.from_pylist(waiting, schema=schema))
        waiting.clear()

    def write(row: EntryRow, group: Group) -> None:
        waiting.extend(to_rows(row, group))
        if len(waiting) >= ROW_GROUP:
            flush()

    writer = parquet.ParquetWriter(partial, schema)
    try:
        yield write, lambda: number
        flush()
        writer.close()
        partial.replace(path)
    finally:
        writer.close()
        partial.unlink(missing_ok=True)


_OPENERS: Mapping[str, Any] = {JSONL: _open_lines, PARQUET: _open_table, DATASET: _open_table}


def _card(num_entries: int, store: str) -> str:
    """The dataset's card, which also says to `load_dataset` where the rows are."""
    return f"""---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train.parquet
---

# Experience

{num_entries} entries of `{store}`, one sequence a row: tokens, masks, log-probs, rewards and lineage.
`manifest.json` says which entries they are, and which of them were deleted since.
"""
