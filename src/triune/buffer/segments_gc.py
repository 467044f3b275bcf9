"""Takes bytes that nobody refers to out of segments: of deleted and evicted entries, and of puts that never happened.

A segment without a reference is removed, one of which less than half is referred to is written anew without the rest,
and in others the rest is overwritten. As transactions of all processes happen one after another, and a process writes
its segments inside them, whatever has no reference inside a transaction will never have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from triune.buffer.segments_places import Place
from triune.buffer.store import Store
from triune.errors import StoreError, WireError
from triune.failpoints import failpoint

LEAST_LIVE_RATIO = 0.5
"""Segments of which less than this is referred to are written anew."""


class Reclaimed(msgspec.Struct, frozen=True, kw_only=True):
    """What was done to segments, or would be.

    Attributes:
        num_segments: How many there were.
        num_removed: Without a reference, of which some had no row either.
        num_compacted: Written anew without what nobody refers to.
        num_wiped: In which unreferenced bytes were overwritten where they lie.
        num_bytes: Bytes that are gone.
    """

    num_segments: int = 0
    num_removed: int = 0
    num_compacted: int = 0
    num_wiped: int = 0
    num_bytes: int = 0


class SegmentFact(NamedTuple):
    """A segment as its rows and its place see it.

    Attributes:
        size: Its number of bytes; None = it is missing.
        end: Where the last bytes end that a row refers to.
        live: Bytes that rows refer to.
        has_row: Whether it belongs to the buffer; without, it is of a put that never happened.
        wiped: How many of its unreferenced bytes were overwritten.
    """

    name: str
    size: int | None
    end: int
    live: int
    num_blobs: int
    has_row: bool
    wiped: int = 0

    @property
    def dead(self) -> int:
        """Bytes that nobody refers to."""
        return 0 if self.size is None else max(0, self.size - self.live)


def survey(store: Store, place: Place) -> list[SegmentFact]:
    """Every segment that has a row or a file; call it inside a transaction."""
    sizes = place.sizes()
    rows = store.db.all(
        "SELECT s.name, s.wiped, count(b.entry), coalesce(sum(b.size), 0), coalesce(max(b.start + b.size), 0) "
        "FROM segments s LEFT JOIN segment_blobs b ON b.segment = s.name GROUP BY s.name, s.wiped ORDER BY s.name"
    )
    found = [
        SegmentFact(name, sizes.get(name), end, live, number, True, wiped) for name, wiped, number, live, end in rows
    ]
    known = {fact.name for fact in found}
    return found + [SegmentFact(name, sizes[name], 0, 0, 0, False) for name in sorted(sizes.keys() - known)]


def reclaim(store: Store, *, is_dry: bool = False) -> Reclaimed:
    """Make unreferenced bytes disappear from the disk; nothing where the buffer has no segments.

    What is damaged is left as it is, for `verify` to find. Stopped in the middle, the next call does the rest.

    Raises:
        StoreError: The place fails, or is not there.
    """
    with store.db.transaction():
        place = store.blobs.find_place()
        if place is None:
            return Reclaimed()
        if not place.is_marked():
            raise StoreError(
                f"segments in {place.where}", "the place is not there", "the folder of the segments", "mount it"
            )
        facts = survey(store, place)
    counts: dict[str, int] = {"num_removed": 0, "num_compacted": 0, "num_wiped": 0}
    num_bytes = 0
    for fact in facts:
        what, number = _reclaim_one(store, place, fact.name, is_dry)
        if what:
            counts[what] += 1
            num_bytes += number
    return Reclaimed(num_segments=len(facts), num_bytes=num_bytes, **counts)


def _reclaim_one(store: Store, place: Place, name: str, is_dry: bool) -> tuple[str, int]:
    """What was done to a segment, or would be (a name of a count, or nothing), and how many bytes are gone."""
    db = store.db
    with db.transaction():
        size = place.size(name)
        row = db.one("SELECT wiped FROM segments WHERE name = ?", (name,))
        refs = db.all(
            "SELECT entry, revision, start, size, crc FROM segment_blobs WHERE segment = ? ORDER BY start", (name,)
        )
        gaps = _gaps(refs, size or 0)
        dead, wiped = sum(length for _, length in gaps), row[0] if row is not None else 0
        if not refs:
            what, number = "num_removed", dead
        elif size is not None and size - dead < LEAST_LIVE_RATIO * size:
            what, number = "num_compacted", dead
        elif dead > wiped:
            what, number = "num_wiped", dead - wiped
        else:
            return "", 0
        if is_dry:
            return what, number
        if what == "num_wiped" or (refs and not _move(store, refs, name)):
            place.wipe(name, gaps)
            db.execute("UPDATE segments SET wiped = ? WHERE name = ?", (dead, name))
            return "num_wiped", number
        db.execute("DELETE FROM segments WHERE name = ?", (name,))
        if row is None:
            place.delete(name)  # inside: nobody may be about to commit a row for it
    failpoint("buffer.gc.after_commit")
    place.delete(name)
    return what, number


def _move(store: Store, refs: Sequence[tuple[int, int, int, int, int]], name: str) -> bool:
    """Keep what is referred to once more, in the segment this process writes; False where some of it is damaged."""
    blobs = store.blobs.load([(entry, revision, b"") for entry, revision, *_ in refs])
    if any(isinstance(blob, WireError) for blob in blobs):
        return False
    store.db.execute("DELETE FROM segment_blobs WHERE segment = ?", (name,))
    for (entry, revision, *_), blob in zip(refs, blobs, strict=True):
        assert isinstance(blob, bytes), "none is damaged"
        store.db.unwritten[entry, revision] = blob
    return True


def _gaps(refs: Sequence[tuple[int, int, int, int, int]], size: int) -> list[tuple[int, int]]:
    """The ranges (start, size) between what is referred to."""
    gaps, at = [], 0
    for _, _, start, length, _ in refs:
        if start > at:
            gaps.append((at, start - at))
        at = max(at, start + length)
    if size > at:
        gaps.append((at, size - at))
    return gaps
