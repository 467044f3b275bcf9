"""Many small entries that wait, written past the front door: a million in seconds instead of minutes."""

from __future__ import annotations

import random
from typing import Any

from triune.records import GroupId, encode_group
from triune.testing.groups import make_group

_ENTRY = (
    "INSERT INTO entries(entry, buffer, scope, state, class, score, ledger, revision, oldest_version, "
    "newest_version, num_records, reward, source, attempts, epoch, max_uses, created, task, advantage) "
    "VALUES (?, 'main', ?, 'ready', 0, ?, ?, 0, 0, 0, 1, ?, 'policy', '0.0', 0, 1, ?, ?, ?)"
)
_BLOBS = (
    "INSERT INTO revisions(entry, revision, is_whole, operators, blob) "
    "SELECT seq, 0, 1, '[]', ? FROM entries WHERE seq > ?"
)
PART = 10_000


def insert_entries(database: Any, run: str, first: int, num: int) -> None:
    """Add `num` ready entries of a run, of ten thousand tasks, with priorities and rewards by chance.

    Call it inside a transaction. All hold the same bytes; `first` numbers them, and seeds the chance.
    """
    blob = encode_group(make_group(GroupId(run, "bulk", "0", 0), rewards=(1.0,), answer=4))
    chance = random.Random(first)
    base = (database.one("SELECT coalesce(max(seq), 0) FROM entries") or (0,))[0]
    for start in range(0, num, PART):
        numbers = range(start, min(num, start + PART))
        database.execute_many(
            _ENTRY,
            [
                (
                    f"{run}/bulk/{(first + n) % 10_000}/{first + n:09d}", run, round(chance.random(), 3),
                    first + n, chance.random(), database.now, f"bulk/{(first + n) % 10_000}", chance.random(),
                )
                for n in numbers
            ],
        )  # fmt: skip
    database.execute(_BLOBS, (blob, base))
    database.count("puts", num)
