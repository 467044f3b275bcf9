"""Rows by which people steer a running run, read at step boundaries (CONTRACTS C9)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from triune.buffer.database import Database
from triune.buffer.runs import Incarnation, Runs
from triune.errors import ConfigError, StoreError

ACTIONS = ("pause", "resume", "stop", "set")


class Control:
    """Ask, read, acknowledge."""

    def __init__(self, db: Database, runs: Runs) -> None:
        self.db, self.runs = db, runs

    def steer(self, run: str, action: str, fields: Mapping[str, Any], by: str) -> int:
        """Ask a run for something; the number of the row.

        Raises:
            ConfigError: No such action, or fields beside an action other than `set`.
        """
        if action not in ACTIONS or bool(fields) != (action == "set"):
            expected = f"one of {', '.join(ACTIONS)}, with fields for `set` only"
            raise ConfigError(f"control of run {run!r}", f"{action!r} with {dict(fields)}", expected)
        row = self.db.one(
            "INSERT INTO control(run, action, fields, by, at) VALUES (?, ?, ?, ?, ?) RETURNING id",
            (run, action, msgspec.msgpack.encode(fields), by, self.db.now),
        )
        assert row is not None, "an insert returns its row"
        self.db.touched.add("control")
        return row[0]

    def pending(self, run: str) -> list[Mapping[str, Any]]:
        """Unacknowledged rows, oldest first."""
        rows = self.db.all(
            "SELECT id, action, fields, by, at FROM control WHERE run = ? AND acked_at IS NULL ORDER BY id", (run,)
        )
        return [
            {"id": id_, "action": action, "fields": msgspec.msgpack.decode(fields), "by": by, "at_s": at}
            for id_, action, fields, by, at in rows
        ]

    def ack(self, who: Incarnation, row_id: int, by: str, outcome: str) -> None:
        """Say that a row was carried out (or why not), by whom and when; repeating it changes nothing.

        Raises:
            StoreError: There is no such row for this run.
        """
        self.runs.check(who)
        if self.db.one("SELECT 1 FROM control WHERE id = ? AND run = ?", (row_id, who.run)) is None:
            raise StoreError(f"control row {row_id}", f"not in {self.db.where}", f"a row of run {who.run!r}")
        self.db.execute(
            "UPDATE control SET acked_by = ?, acked_at = ?, outcome = ? WHERE id = ? AND acked_at IS NULL",
            (by, self.db.now, outcome, row_id),
        )
        self.db.touched.add("control")

    def history(self, run: str) -> list[Mapping[str, Any]]:
        """All rows of a run with who acknowledged them and when, oldest first."""
        rows = self.db.all(
            "SELECT id, action, fields, by, at, acked_by, acked_at, outcome FROM control WHERE run = ? ORDER BY id",
            (run,),
        )
        names = ("id", "action", "fields", "by", "at_s", "acked_by", "acked_at_s", "outcome")
        return [{**dict(zip(names, row, strict=True)), "fields": msgspec.msgpack.decode(row[2])} for row in rows]
