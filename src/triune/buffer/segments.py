"""Where a revision's bytes are: in its row, or, when they are many, in a segment: a file beside the database.

A process appends to segments of its own, of names that nobody else uses. What a transaction keeps is written at its end
and is on the disk before it commits, so a crash in between leaves bytes without a row, never a row without bytes. Such
bytes, and those of entries that were evicted, are for `segments_gc` to reclaim.
"""

from __future__ import annotations

import json
import uuid
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from triune.buffer.database import Database, Row
from triune.buffer.segments_places import Place, Span, open_place
from triune.errors import ConfigError, StoreError, WireError
from triune.failpoints import failpoint

if TYPE_CHECKING:
    from triune.buffer.config import SegmentSettings

ROLL_BYTES = 64 * 2**20
"""Size at which a process begins a new segment."""

AT_ONCE = 500
"""Entries asked for in one query."""

Key = tuple[int, int]
"""(entry's position, revision)."""

_INSERT = "INSERT INTO segment_blobs(entry, revision, segment, start, size, crc) VALUES (?, ?, ?, ?, ?, ?)"


class _Segment(NamedTuple):
    """What this process appends to."""

    name: str
    end: int


class Blobs:
    """The only way to and from `revisions.blob`: a row holds the bytes, or nothing where they are in a segment.

    Call it inside a transaction.
    """

    def __init__(self, db: Database, settings: SegmentSettings | None = None) -> None:
        """Without settings everything is kept in its row; what is in segments is read all the same."""
        self.db, self.settings = db, settings
        self._beside = Path(db.where).absolute().parent
        self._writer, self._number = uuid.uuid4().hex[:12], 0
        self._segment: _Segment | None = None
        self._opened: tuple[str, Place] | None = None
        db.before_commit = self.flush

    # ---- writing

    def keep(self, seq: int, revision: int, blob: bytes) -> bytes:
        """Take a revision's bytes; what its row holds of them."""
        if self.settings is None or len(blob) < self.settings.min_bytes:
            return blob
        self.db.unwritten[seq, revision] = blob
        return b""

    def forget(self, seq: int) -> None:
        """The entry's revisions were taken away, or replaced by other ones."""
        for key in [key for key in self.db.unwritten if key[0] == seq]:
            del self.db.unwritten[key]
        self.db.execute("DELETE FROM segment_blobs WHERE entry = ?", (seq,))

    def flush(self) -> None:
        """Write what the transaction kept, and who refers to it; the database calls it before it commits.

        Raises:
            StoreError: The place cannot be written; nothing of the transaction happens.
        """
        unwritten = self.db.unwritten
        if not unwritten:
            return
        place, blobs = self._place_to_write(), list(unwritten.values())
        segment = self._segment_to_write()
        self._segment = None  # unless all goes well nobody knows what is in it
        if not place.append(segment.name, segment.end, blobs):
            segment = self._new_segment()
            place.append(segment.name, 0, blobs)
        end, rows = segment.end, []
        for (seq, revision), blob in unwritten.items():
            rows.append((seq, revision, segment.name, end, len(blob), zlib.crc32(blob)))
            end += len(blob)
        self.db.execute_many(_INSERT, rows)
        roll_bytes = ROLL_BYTES if self.settings is None else self.settings.roll_bytes
        self._segment = _Segment(segment.name, end) if place.appends and end < roll_bytes else None
        unwritten.clear()
        failpoint("buffer.segments.before_commit")

    def _segment_to_write(self) -> _Segment:
        """The current one, unless its transaction was undone or it was reclaimed meanwhile."""
        segment = self._segment
        if segment is not None and self.db.one("SELECT 1 FROM segments WHERE name = ?", (segment.name,)) is not None:
            return segment
        return self._new_segment()

    def _new_segment(self) -> _Segment:
        self._number += 1
        name = f"{self._writer}-{self._number:06d}.seg"
        self.db.execute("INSERT INTO segments(name) VALUES (?)", (name,))
        return _Segment(name, 0)

    # ---- reading

    def load(self, rows: Sequence[tuple[int, int, bytes]]) -> list[bytes | WireError]:
        """The bytes of rows (entry's position, revision, what the row holds), or why they cannot be had, in order.

        Raises:
            StoreError: The place of the segments fails or is not there at all.
        """
        elsewhere = [(seq, revision) for seq, revision, held in rows if not held]
        if not elsewhere:
            return [held for _, _, held in rows]
        found = self._fetch(elsewhere)
        return [held or found[seq, revision] for seq, revision, held in rows]

    def _fetch(self, keys: Sequence[Key]) -> dict[Key, bytes | WireError]:
        found: dict[Key, bytes | WireError] = {key: _lost("neither in its row nor in a segment") for key in keys}
        found |= {key: blob for key, blob in self.db.unwritten.items() if key in found}
        entries = sorted({seq for seq, _ in keys})
        wanted: list[Row] = []
        for start in range(0, len(entries), AT_ONCE):
            part = tuple(entries[start : start + AT_ONCE])
            marks = ", ".join("?" * len(part))
            sql = "SELECT entry, revision, segment, start, size, crc FROM segment_blobs WHERE entry IN"
            wanted += [row for row in self.db.all(f"{sql} ({marks})", part) if row[:2] in found]
        if wanted:
            place = self.place()
            blobs = place.read([Span(*row[2:5]) for row in wanted])
            if None in blobs and not place.is_marked():
                raise _not_there(place)
            for row, blob in zip(wanted, blobs, strict=True):
                found[row[0], row[1]] = _checked(blob, *row[2:])
        return found

    # ---- where they are

    def place(self) -> Place:
        """Where the segments of this buffer lie.

        Raises:
            StoreError: It has none.
        """
        row = self._row()
        if row is None:
            raise StoreError(
                self.db.where, "no row says where its segments are", "one", "restore the store from a copy"
            )
        return self._open(*row)

    def find_place(self) -> Place | None:
        """The same; None where nothing was ever kept in segments."""
        row = self._row()
        return None if row is None else self._open(*row)

    def attach(self) -> None:
        """Make the place that the settings name, or go on with it.

        Raises:
            ConfigError: The buffer's segments are in another place.
            StoreError: It cannot be written, or is gone.
        """
        settings, row = self.settings, self._row()
        if settings is None:
            return
        if row is None:
            row = (uuid.uuid4().hex[:16], settings.url)
            self.db.execute("INSERT INTO segment_store(buffer, url) VALUES (?, ?)", row)
        place = self._open(row[0], settings.url)
        if not place.is_marked():
            if self.db.one("SELECT 1 FROM segment_blobs LIMIT 1") is not None:
                if settings.url == row[1]:
                    raise _not_there(place)
                expected = f"{row[1]!r}, where they are"
                do = f"move the folder {row[0]} there first, or name {row[1]!r}"
                raise ConfigError("buffer.segments.url", f"{settings.url!r}, without this buffer's", expected, do)
            place.mark(json.dumps({"format": 1, "buffer": row[0]}))
        if settings.url != row[1]:
            self.db.execute("UPDATE segment_store SET url = ?", (settings.url,))

    def _place_to_write(self) -> Place:
        if self._row() is None:
            self.attach()
        return self.place()

    def _row(self) -> tuple[str, str] | None:
        row = self.db.one("SELECT buffer, url FROM segment_store")
        return None if row is None else (row[0], row[1])

    def _open(self, buffer: str, url: str) -> Place:
        if self._opened is None or self._opened[0] != url:
            self._opened = (url, open_place(url, self._beside, buffer))
            self._segment = None
        return self._opened[1]


def _checked(blob: bytes | None, name: str, start: int, size: int, crc: int) -> bytes | WireError:
    if blob is None:
        return _lost(f"segment {name} is missing")
    if len(blob) != size:
        return _lost(f"segment {name} ends before its byte {start + size}")
    if zlib.crc32(blob) != crc:
        return _lost(f"the checksum differs in segment {name}, at {start}")
    return blob


def _lost(found: str) -> WireError:
    return WireError("segment", found, "the bytes that were written", "restore the segment from a copy")


def _not_there(place: Place) -> StoreError:
    return StoreError(
        f"segments in {place.where}",
        "the place is not there: it has no mark",
        "the folder in which they were written",
        "mount it, or name where it was moved in buffer.segments.url; no entry was changed",
    )


def live_bytes(db: Database) -> Mapping[str, float]:
    """`segments/num_blobs` and `segments/bytes`: what rows refer to."""
    number, size = db.one("SELECT count(*), coalesce(sum(size), 0) FROM segment_blobs") or (0, 0)
    return {"segments/num_blobs": number, "segments/bytes": size}
