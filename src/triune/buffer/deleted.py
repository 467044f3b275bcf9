"""By what a deleted entry is known again, so that no import brings it back under another name: hashes, never words."""

from __future__ import annotations

from collections.abc import Collection

from triune.buffer.content import entry_hash
from triune.buffer.database import Database
from triune.records import Group

IMPORTED = "import"
"""In the ids of what was made of rows of text, in the place of a run's name."""

REFUSED = ("deleted from this buffer before", "an entry that may be used")
"""What an import says of it: found, and expected."""


def marks_of(group: Group, content: str = "") -> set[str]:
    """The hash of an entry's tokens, and of the row of text it was made of, whatever a tokenizer makes of that.

    `content` is its `entry_hash`, where the caller has it.
    """
    row = {group.id.task_key} if group.id.run.partition("@")[0] == IMPORTED else set[str]()
    return row | {content or entry_hash(group)} if group.records else row


def remember(db: Database, marks: Collection[str]) -> None:
    """Keep the marks of what is being deleted. Call it inside that transaction."""
    sql = "INSERT INTO deleted(mark) VALUES (?) ON CONFLICT(mark) DO NOTHING"
    db.execute_many(sql, [(mark,) for mark in sorted(marks)])


def are_deleted(db: Database, marks: Collection[str]) -> set[str]:
    """Those of the marks that something deleted had. Call it inside the transaction that stores the rest."""
    if not marks:
        return set()
    places = ", ".join("?" * len(marks))
    return {mark for (mark,) in db.all(f"SELECT mark FROM deleted WHERE mark IN ({places})", tuple(sorted(marks)))}
