"""A store for notebooks, scripts and the command line: synchronous, without torch, beside a run that goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from triune import registry
from triune.buffer.config import SegmentSettings
from triune.buffer.entry_walk import read_entry, walk, walk_groups
from triune.buffer.export import Exported, export_entries
from triune.buffer.lineage import Lineage, UseFact, used_by, why
from triune.buffer.query import equals
from triune.buffer.query_columns import EntryRow
from triune.buffer.query_parser import parse_filter
from triune.buffer.statistics import Statistics, statistics
from triune.buffer.store import Store
from triune.buffer.stores.postgres import MARK
from triune.buffer.verify import Verified, attempt, check_file, verify
from triune.errors import ConfigError
from triune.records import Group

_SERVERS = ("postgresql://", "postgres://")
_FILE_URL = "sqlite:///"


class OpenBuffer(AbstractContextManager["OpenBuffer"]):
    """What a store holds. Every call is one short transaction or a few, so a run may use the store meanwhile.

    Attributes:
        where: The file or address.
        run: Name of the run it was opened by; "" where it was opened as a store.
        store: The store itself.
    """

    def __init__(self, store: Store, *, run: str = "") -> None:
        self.store, self.run, self.where = store, run, store.db.where

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; looking changed no entry."""
        self.store.db.close()

    def __iter__(self) -> Iterator[EntryRow]:
        """Every entry, in the order of arrival."""
        return self.entries()

    def entries(self, where: str = "") -> Iterator[EntryRow]:
        """Entries that fit a filter, in the order of arrival.

        Raises:
            ConfigError: The filter cannot be read.
        """
        return (row for row, _ in walk(self.store, parse_filter(where)))

    def groups(self, where: str = "") -> Iterator[Group]:
        """Their records: the newest revision of each."""
        return (group for _, group in walk_groups(self.store, parse_filter(where)))

    def query(self, where: str = "", *, limit: int = 100) -> list[EntryRow]:
        """The newest entries that fit a filter, newest first.

        Raises:
            ConfigError: The filter cannot be read.
        """
        return [row for row, _ in walk(self.store, parse_filter(where), newest_first=True, limit=limit)]

    def read(self, entry: str, revision: int | None = None) -> Group:
        """One entry's records, its newest revision by default.

        Raises:
            StoreError: There is no such entry or revision, or its bytes are damaged.
        """
        with self.store.db.transaction(looks=True):
            self.store.entries.locate(entry)
        [(row, _)] = walk(self.store, equals("entry", entry))
        with self.store.db.transaction():
            return read_entry(self.store, row, revision)

    def why(self, identity: str) -> Lineage:
        """Where an entry, a rollout or an experience came from, and which steps were trained on it.

        Raises:
            ConfigError: The text is no id.
            StoreError: There is none of that name.
        """
        with self.store.db.transaction():
            return why(self.store, identity)

    def step(self, number: int, *, run: str = "") -> tuple[UseFact, ...]:
        """What a step of a run (by default the one it was opened by) was trained on.

        Raises:
            StoreError: That step used nothing.
        """
        with self.store.db.transaction(looks=True):
            return used_by(self.store, run or self.run, number)

    def stats(self) -> Statistics:
        """Depth, age, staleness and rewards per source."""
        with self.store.db.transaction(looks=True):
            return statistics(self.store)

    def export(self, out: str | Path, where: str = "") -> Exported:
        """Write entries that fit to a `.jsonl` or `.parquet` file, or to a new dataset folder, with a manifest.

        Raises:
            ConfigError: The filter cannot be read, or the name says no format.
            StoreError: The disk is full.
        """
        return export_entries(self.store, parse_filter(where), Path(out))

    def verify(self) -> Verified:
        """Read every byte, and say what is damaged or contradicts itself."""
        return verify(self.store)


def open(where: str | Path, *, makes: bool = False) -> OpenBuffer:
    """Open the store of a run, or a store by itself, to look at it.

    The tables of an older Triune are brought up first, after which that one refuses them.

    >>> import triune.buffer
    >>> with triune.buffer.open("runs/quickstart") as buffer:
    ...     for row in buffer.query("state = ready AND reward > 0.2", limit=2):
    ...         group = buffer.read(row.entry)
    ...         print(row.entry, row.reward, group.task.data["question"])
    quickstart/train/t1/0 0.5 6 x 7?
    quickstart/train/t0/0 0.5 6 x 7?

    Args:
        where: Folder of a run, its name under `runs/`, a SQLite file, `sqlite:///FILE`, or
            `postgresql://USER@HOST/DATABASE?schema=NAME`.
        makes: Make an empty store where a file, by its ending `.sqlite`, or a schema is named that is not there yet.

    Raises:
        ConfigError: There is no run and no store there, or its store was only in memory.
        StoreError: The store cannot be opened.
    """
    text = str(where)
    if text.startswith(_SERVERS):
        return OpenBuffer(Store(_build(_spec_of_url(text), Path(), makes=makes)))
    file = Path(text.removeprefix(_FILE_URL))
    is_new = makes and file.suffix == ".sqlite" and not file.exists()
    path = file if is_new else find_path(text)
    if is_new or path.is_file():
        return OpenBuffer(Store(_build({"use": "sqlite", "path": str(path)}, path.parent)))
    run, spec, segments = _spec_of_run(path)
    return OpenBuffer(Store(_build(spec, path), segments=segments), run=run)


def verify_at(where: str | Path) -> Verified:
    """Verify a store that may be too damaged to open.

    Raises:
        ConfigError: There is no run and no store there.
    """
    text = str(where)
    finding = None
    if not text.startswith(_SERVERS):
        path = find_path(text)
        file = path if path.is_file() else sqlite_file(path)
        finding = None if file is None else check_file(file)
    if finding is None:
        outcome = attempt(lambda: open(where), "file")
        if isinstance(outcome, OpenBuffer):
            with outcome as buffer:
                return buffer.verify()
        finding = outcome
    return Verified(where=text, num_entries=0, num_blobs=0, num_bytes=0, findings=(finding,))


def find_path(where: str) -> Path:
    """The file of a store, or the folder of a run.

    Raises:
        ConfigError: There is neither; names the runs that are there.
    """
    path = Path(where.removeprefix(_FILE_URL))
    if path.is_file():
        return path
    for folder in (path, Path("runs") / path):
        if (folder / "run.resolved.json").is_file():
            return folder
        if (folder / "buffer.sqlite").is_file():
            return folder / "buffer.sqlite"
    there = sorted(found.parent.name for found in Path("runs").glob("*/run.resolved.json"))
    known = f"one of {', '.join(there)}, or a run's folder" if there else "the folder of a run"
    do = "start one with `triune run FILE`, or name a store's file"
    raise ConfigError(where, "no run and no store here", known, do)


def sqlite_file(folder: Path) -> Path | None:
    """The file in which a run keeps its store; None where it keeps it elsewhere."""
    _, spec, _ = _spec_of_run(folder)
    return Path(spec.get("path") or folder / "buffer.sqlite") if spec["use"] == "sqlite" else None


def _spec_of_run(folder: Path) -> tuple[str, dict[str, Any], SegmentSettings | None]:
    """A run's name, and what its file says of its store and of where large records go.

    Raises:
        ConfigError: Its store was only in memory, or is not there yet.
    """
    file = folder / "run.resolved.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))["config"]
        run, spec = config["name"], dict(config["buffer"]["store"])
        plain = config["buffer"].get("segments")
        segments = None if plain is None else SegmentSettings.model_validate(plain)
    except (OSError, ValueError, KeyError, TypeError) as error:
        found = f"no configuration of a run ({type(error).__name__}: {error})"
        raise ConfigError(str(file), found, "what `triune run` wrote", "name the store's file instead") from error
    if spec["use"] == "memory":
        found, expected = "its buffer was only in memory", "buffer.store: sqlite"
        raise ConfigError(str(folder), found, expected, "nothing is left to look at")
    if spec["use"] == "postgres" and not (spec.get("schema") or (folder / MARK).is_file()):
        found, expected = "no buffer yet", "a run that has explored"
        raise ConfigError(str(folder), found, expected, "start it with `triune run`")
    if spec["use"] == "sqlite" and not Path(spec.get("path") or folder / "buffer.sqlite").is_file():
        found, expected = "no buffer.sqlite yet", "a run that has explored"
        raise ConfigError(str(folder), found, expected, "start it with `triune run`")
    return run, spec, segments


def _spec_of_url(url: str) -> dict[str, Any]:
    """A server's address with its parameter `schema`, which is ours, apart.

    Raises:
        ConfigError: There is no such parameter.
    """
    parts = urlsplit(url)
    parameters = parse_qsl(parts.query, keep_blank_values=True)
    schemas = [value for name, value in parameters if name == "schema" and value]
    if len(schemas) != 1:
        do = "add `?schema=NAME`; the file buffer.postgres in a run's folder holds the name"
        raise ConfigError(url, f"{len(schemas)} schemas named", "one: a schema is a buffer", do)
    rest = urlencode([each for each in parameters if each[0] != "schema"], safe="/")
    return {"use": "postgres", "url": urlunsplit(parts._replace(query=rest)), "schema": schemas[0]}


def _build(spec: dict[str, Any], folder: Path, **options: bool) -> Any:
    return registry.build("store", spec, "buffer.store")(folder, **options)
