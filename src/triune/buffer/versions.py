"""Published weights: numbers that are never reused, and which of them lie on the surviving line (CONTRACTS C4)."""

from __future__ import annotations

import msgspec

from triune.buffer.database import Database
from triune.buffer.runs import Incarnation, Runs
from triune.errors import StoreError
from triune.failpoints import failpoint
from triune.ports import WeightUpdate


class Versions:
    """Reserve, commit, look up, lose."""

    def __init__(self, db: Database, runs: Runs) -> None:
        self.db, self.runs = db, runs

    def begin(self, who: Incarnation, step: int) -> int:
        """Reserve the next number, durably."""
        self.runs.check(who)
        row = self.db.one("SELECT max(version) FROM versions WHERE run = ?", (who.run,))
        version = 0 if row is None or row[0] is None else row[0] + 1
        self.db.execute(
            "INSERT INTO versions(run, version, state, step, epoch) VALUES (?, ?, 'reserved', ?, ?)",
            (who.run, version, step, who.epoch),
        )
        return version

    def commit(self, who: Incarnation, update: WeightUpdate) -> None:
        """The weights are there: admission counts with them. Repeating it changes nothing.

        Raises:
            StoreError: The number was not reserved, or was lost.
        """
        self.runs.check(who)
        row = self.db.one("SELECT state FROM versions WHERE run = ? AND version = ?", (who.run, update.version))
        if row is None or row[0] == "lost":
            found = "never reserved" if row is None else "lost"
            raise StoreError(
                f"version {update.version}", found, "a number from begin_version", "publish under a new number"
            )
        if row[0] == "committed":
            return
        parent = self.newest(who.run)
        line = 0 if parent is None else parent[1] + int(update.step > parent[2])
        self.db.execute(
            "UPDATE versions SET state = 'committed', step = ?, parent = ?, line = ?, digest = ?, record = ? "
            "WHERE run = ? AND version = ?",
            (
                update.step,
                parent[0] if parent else None,
                line,
                update.digest,
                msgspec.msgpack.encode(update),
                who.run,
                update.version,
            ),
        )
        self.db.execute("UPDATE runs SET line = ? WHERE run = ?", (line, who.run))
        self.runs.settle(who)
        failpoint("buffer.commit_version.inside")
        self.db.touched |= {"versions", "slots"}

    def newest(self, run: str) -> tuple[int, int, int] | None:
        """(version, line, step) of the newest surviving one."""
        row = self.db.one(
            "SELECT version, line, step FROM versions WHERE run = ? AND state = 'committed' "
            "ORDER BY version DESC LIMIT 1",
            (run,),
        )
        return (row[0], row[1], row[2]) if row else None

    def latest(self, run: str, newer_than: int = -1) -> WeightUpdate | None:
        """The newest surviving one, if it is newer than that."""
        row = self.db.one(
            "SELECT record FROM versions WHERE run = ? AND state = 'committed' AND version > ? "
            "ORDER BY version DESC LIMIT 1",
            (run, newer_than),
        )
        return msgspec.msgpack.decode(row[0], type=WeightUpdate) if row else None

    def staleness(self, run: str, oldest: int) -> int:
        """Published steps on the surviving line since `oldest`; 0 when the policy sampled nothing."""
        newest = self.newest(run)
        if oldest < 0 or newest is None:
            return 0
        row = self.db.one(
            "SELECT line FROM versions WHERE run = ? AND state = 'committed' AND version <= ? "
            "ORDER BY version DESC LIMIT 1",
            (run, oldest),
        )
        return newest[1] - (row[0] if row else -1)

    def floor(self, run: str, max_staleness: int) -> int:
        """The oldest version that is at most `max_staleness` published steps behind; 0 when there is none."""
        row = self.db.one(
            "SELECT min(version) FROM versions WHERE run = ?1 AND state = 'committed' AND "
            "line >= (SELECT line FROM runs WHERE run = ?1) - ?2",  # a short range of versions_line
            (run, max_staleness),
        )
        return row[0] if row and row[0] is not None else 0

    def lose_after(self, run: str, version: int) -> None:
        """Versions above `version` are no longer on the surviving line; their numbers stay taken."""
        self.db.execute(
            "UPDATE versions SET state = 'lost', line = NULL WHERE run = ? AND version > ? AND state != 'lost'",
            (run, version),
        )
        newest = self.newest(run)
        self.db.execute("UPDATE runs SET line = ? WHERE run = ?", (newest[1] if newest else -1, run))
        self.db.touched |= {"versions", "slots"}
