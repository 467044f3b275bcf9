"""Which exports a store made, and what they are told: a deletion reaches every one of them, whatever comes between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from triune.buffer.content import REDACTED
from triune.buffer.manifest import note_redaction
from triune.buffer.query import Filter
from triune.buffer.query_columns import group_of
from triune.buffer.store import Store
from triune.errors import StoreError

_UNFINISHED = -1
"""Number of entries of an export that is being written."""

Earlier = tuple[float, int, str]
"""What was known of an export that another one under the same name replaces."""

_NOTE = (
    "INSERT INTO exports(manifest, at, num_entries, filter) VALUES (?, ?, ?, ?) ON CONFLICT(manifest) "
    "DO UPDATE SET at = excluded.at, num_entries = excluded.num_entries, filter = excluded.filter"
)


class Told(NamedTuple):
    """Which exports heard of what is deleted.

    Attributes:
        manifests: Manifest → how many of its entries are newly marked as deleted.
        lost: Manifests that are no longer where they were written, or cannot be changed.
        unfinished: Of exports that are being written and look by themselves at their end, or were cut off.
    """

    manifests: Mapping[str, int] = {}
    lost: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()


def announce(store: Store, manifest: Path, wanted: Filter) -> Earlier | None:
    """Note that an export begins, before it reads its first entry; what `withdraw` needs to undo that."""
    with store.db.transaction():
        earlier = store.db.one("SELECT at, num_entries, filter FROM exports WHERE manifest = ?", (_name(manifest),))
        store.db.execute(_NOTE, (_name(manifest), store.db.now, _UNFINISHED, wanted.text))
    return None if earlier is None else (earlier[0], earlier[1], earlier[2])


def withdraw(store: Store, manifest: Path, earlier: Earlier | None) -> None:
    """Forget an export that failed and left nothing behind."""
    with store.db.transaction():
        if earlier is None:
            store.db.execute("DELETE FROM exports WHERE manifest = ?", (_name(manifest),))
        else:
            store.db.execute(_NOTE, (_name(manifest), *earlier))


def complete(store: Store, manifest: Path, num_entries: int) -> None:
    """Note that an export is there, and in its manifest what was deleted while it was written."""
    with store.db.transaction():
        sql = "UPDATE exports SET at = ?, num_entries = ? WHERE manifest = ?"
        store.db.execute(sql, (store.db.now, num_entries, _name(manifest)))
    told: set[str] | None = None
    while (gone := _deleted(store)) != told:
        note_redaction(manifest, gone, "a deletion during the export")
        told = gone


def tell_exports(store: Store, by: str) -> Told:
    """Mark in the manifest of every export all entries that are deleted by now, also those of a `gc` that was cut off.

    Whoever changes a manifest looks again afterwards, so that of two at a time none undoes the note of the other.
    """
    touched, lost, unfinished = Counter[str](), dict[str, None](), dict[str, None]()
    told: set[str] = set()
    while (gone := _deleted(store)) != told:
        with store.db.transaction():
            exports = store.db.all("SELECT manifest, num_entries FROM exports ORDER BY manifest")
        for name, num_entries in exports:
            number = _mark(Path(name), gone, by)
            if number is not None:
                touched[name] += number
            else:
                (unfinished if num_entries == _UNFINISHED else lost)[name] = None
        told = gone
    return Told({name: number for name, number in touched.items() if number}, tuple(lost), tuple(unfinished))


def _mark(manifest: Path, gone: set[str], by: str) -> int | None:
    try:
        return note_redaction(manifest, gone, by) if manifest.is_file() else None
    except StoreError:
        return None


def _deleted(store: Store) -> set[str]:
    """Names of all deleted entries; of one whose group was made again since, also the name it had before."""
    with store.db.transaction():
        names = {name for (name,) in store.db.all("SELECT entry FROM entries WHERE reason = ?", (REDACTED,))}
    return names | {str(group_of(name)) for name in names if "~" in name}


def _name(manifest: Path) -> str:
    return str(manifest.resolve())
