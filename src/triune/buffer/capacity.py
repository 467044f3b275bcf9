"""A bound on what waits, and who goes when it is reached."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from triune.buffer.choosing import LEAST_WINDOW, WINDOW, Choosing
from triune.buffer.database import Database
from triune.buffer.entries import Entries
from triune.buffer.runs import Incarnation
from triune.ports import EntryState, Refund

Policy = Literal["oldest", "lowest", "stalest"]

MACHINES = ("environment", "judge", "reward", "pipeline", "deadline")
"""Who amends (`by`) and is no person, alone or before a colon (`judge:strict`). Every other name is a person's."""

_IS_MACHINE = " OR ".join(f"a.by = '{name}' OR substr(a.by, 1, {len(name) + 1}) = '{name}:'" for name in MACHINES)
_NEW = "buffer = :buffer AND scope = :run AND class = 0 AND state = 'ready' AND granted = 0"
_EVICTABLE = (
    f"{_NEW} AND NOT EXISTS (SELECT 1 FROM amendments a WHERE a.entry = e.seq AND a.outcome != 'expired' "
    f"AND NOT ({_IS_MACHINE}))"
)
_COLUMNS = {"lowest": "score", "stalest": "oldest_version"}
_FLOOR = {"lowest": -math.inf, "stalest": -1}
"""What a policy never looks at: below every score; sampled by no policy, so of no age."""


class Capacity:
    """Evicts what waits longest, matters least or is oldest, once more than `limit` entries of a run wait in a buffer.

    Counted are entries that are ready and were never leased. Never evicted is what is leased or was used, what is
    urgent, what a person amended, what waits for its reward, groups still being made, and what is open to every run.
    An evicted entry keeps its row, with the reason `oldest`, `lowest` or `stalest`; its bytes are freed and its slot
    is given back, so another group is made. Counting costs time in proportion to `limit`, so a process counts after
    every `limit // 64` puts of its own: each process that puts may pass the bound by one less than that, and below 128
    by nothing. Leases that are given back come on top until the next count.
    """

    def __init__(
        self, db: Database, entries: Entries, choosing: Choosing, *, limit: int | None, policy: Policy = "oldest"
    ) -> None:
        """`limit`: entries; None = any number."""
        self.db, self.entries, self.choosing, self.limit, self.policy = db, entries, choosing, limit, policy
        self._puts: dict[tuple[str, str], int] = {}

    def after_put(self, who: Incarnation, buffer: str, num: int = 1) -> int:
        """Evict what is too much after `num` puts; the number evicted."""
        if self.limit is None:
            return 0
        key = (who.run, buffer)
        self._puts[key] = self._puts.get(key, self.limit) + num
        if self._puts[key] < max(1, self.limit // 64):
            return 0
        self._puts[key] = 0
        row = self.db.one(f"SELECT count(*) FROM entries WHERE {_NEW}", {"buffer": buffer, "run": who.run})
        excess = (row[0] if row else 0) - self.limit
        victims = self._victims(who.run, buffer, excess) if excess > 0 else ()
        for seq in victims:
            self._evict(who.run, seq)
        return len(victims)

    def _evict(self, run: str, seq: int) -> None:
        self.entries.discard(run, seq, EntryState.EVICTED, self.policy, Refund.EVICTED)
        self.db.execute("DELETE FROM revisions WHERE entry = ?", (seq,))
        self.entries.blobs.forget(seq)

    def _victims(self, run: str, buffer: str, num: int) -> Sequence[int]:
        given = {"buffer": buffer, "run": run}
        if self.policy == "oldest":
            sql = f"SELECT seq FROM entries e WHERE {_EVICTABLE} ORDER BY ledger, seq LIMIT :limit"
            return [seq for (seq,) in self.db.all(sql, {**given, "limit": num})]
        if self.policy == "lowest" and self.choosing.priority is not None:
            wide = self._worst(given, max(LEAST_WINDOW, WINDOW * num))
            ranked = self.choosing.rank(run, self.choosing.rows(wide), None)
            return [row.seq for row in ranked[-num:]]
        return self._worst(given, num)

    def _worst(self, given: dict[str, str], num: int) -> list[int]:
        """The lowest in the policy's column; one value after the other, so that an index serves, and ties go by age."""
        column, found, above = _COLUMNS[self.policy], list[int](), _FLOOR[self.policy]
        lowest = (
            f"SELECT {column} FROM entries e WHERE {_EVICTABLE} AND {column} > :above "
            f"ORDER BY {column}, ledger DESC, seq DESC LIMIT 1"
        )
        of_value = (
            f"SELECT seq FROM entries e WHERE {_EVICTABLE} AND {column} = :value ORDER BY ledger, seq LIMIT :limit"
        )
        while len(found) < num:
            row = self.db.one(lowest, {**given, "above": above})
            if row is None:
                break
            above = row[0]
            rows = self.db.all(of_value, {**given, "value": above, "limit": num - len(found)})
            found += [seq for (seq,) in rows]
        return found
