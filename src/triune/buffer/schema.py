"""The tables: every version of the schema as the statements that lead to it from the one before."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from triune.errors import StoreError

VERSION_1 = """
CREATE TABLE schema_version (version INTEGER NOT NULL);

-- One row per run: its incarnation, its admission ledger's totals, where its tasks stand.
CREATE TABLE runs (
    run         TEXT PRIMARY KEY,
    epoch       INTEGER NOT NULL,
    config_hash TEXT NOT NULL,
    data_hash   TEXT NOT NULL,
    admitted    INTEGER NOT NULL DEFAULT 0,
    refunded    INTEGER NOT NULL DEFAULT 0,
    cursor      BLOB,                        -- msgpack; NULL before the first admission
    line        INTEGER NOT NULL DEFAULT -1, -- published steps on the surviving line, 0 = initial weights
    ended       TEXT,                        -- reason, once no more groups will come
    finished    TEXT,                        -- reason, once the trainer wants no more
    opener      TEXT NOT NULL,
    is_settled  INTEGER NOT NULL DEFAULT 1   -- 0 between opening an earlier run and bringing it to its checkpoint
);

-- Who is alive: one row per open buffer, renewed by heartbeat.
CREATE TABLE owners (owner TEXT PRIMARY KEY, run TEXT NOT NULL, epoch INTEGER NOT NULL, expires REAL NOT NULL);

-- One row per slot ever taken, in ledger order. A group that is admitted again gets a further round.
CREATE TABLE admissions (
    seq      INTEGER PRIMARY KEY AUTOINCREMENT,
    run      TEXT NOT NULL,
    taskset  TEXT NOT NULL,
    task_key TEXT NOT NULL,
    visit    INTEGER NOT NULL,
    round    INTEGER NOT NULL DEFAULT 0,
    state    TEXT NOT NULL,                  -- open | put | refunded
    reason   TEXT NOT NULL DEFAULT '',       -- of the refund
    is_due   INTEGER NOT NULL DEFAULT 0,     -- refunded, and to be admitted again
    retries  INTEGER NOT NULL DEFAULT 0,     -- how often its group was admitted again because it was stale
    owner    TEXT NOT NULL,
    epoch    INTEGER NOT NULL
);
CREATE UNIQUE INDEX admissions_group ON admissions (run, taskset, task_key, visit, round);
CREATE INDEX admissions_open ON admissions (run, seq) WHERE state = 'open';

-- One row per put. `scope` is the only run that may lease it, '' = every run.
CREATE TABLE entries (
    seq            INTEGER PRIMARY KEY AUTOINCREMENT,
    entry          TEXT NOT NULL UNIQUE,
    buffer         TEXT NOT NULL,
    scope          TEXT NOT NULL,
    state          TEXT NOT NULL,
    reason         TEXT NOT NULL DEFAULT '',
    class          INTEGER NOT NULL,         -- 1 = urgent (people), 0 = the rest
    score          REAL NOT NULL,
    ledger         INTEGER NOT NULL,         -- admissions.seq, or the last one before it where none
    admission      INTEGER,                  -- admissions.seq whose slot it holds, or NULL
    revision       INTEGER NOT NULL,         -- the newest
    oldest_version INTEGER NOT NULL,         -- as staleness counts it; -1 = not sampled by the policy
    newest_version INTEGER NOT NULL,
    num_records    INTEGER NOT NULL,
    reward         REAL,
    source         TEXT NOT NULL,
    attempts       TEXT NOT NULL,
    epoch          INTEGER NOT NULL,
    max_uses       INTEGER NOT NULL,
    granted        INTEGER NOT NULL DEFAULT 0, -- leased + acked uses of the run in `scope`
    acked          INTEGER NOT NULL DEFAULT 0,
    deadline       REAL,                     -- when waiting or urgent: seconds since 1970
    created        REAL NOT NULL
);
CREATE INDEX entries_deadline ON entries (deadline) WHERE deadline IS NOT NULL;

-- Blobs never change: revision 0 is the raw group, later ones are overlays of it or whole groups.
CREATE TABLE revisions (
    entry     INTEGER NOT NULL,
    revision  INTEGER NOT NULL,
    is_whole  INTEGER NOT NULL,
    operators TEXT NOT NULL,
    blob      BLOB NOT NULL,
    UNIQUE (entry, revision)
);

-- Consumption: one row per grant. A returned use may be granted again under the same number.
CREATE TABLE uses (
    id         INTEGER PRIMARY KEY,
    entry      INTEGER NOT NULL,
    revision   INTEGER NOT NULL,
    consumer   TEXT NOT NULL,
    use_no     INTEGER NOT NULL,
    state      TEXT NOT NULL,                -- leased | acked | returned
    step       INTEGER,
    checkpoint TEXT,
    owner      TEXT NOT NULL,
    epoch      INTEGER NOT NULL,
    expires    REAL NOT NULL
);
CREATE UNIQUE INDEX uses_active ON uses (entry, consumer, use_no) WHERE state != 'returned';
CREATE INDEX uses_leased ON uses (consumer, expires) WHERE state = 'leased';
CREATE INDEX uses_steps ON uses (consumer, step) WHERE state = 'acked';

CREATE TABLE amendments (
    seq     INTEGER PRIMARY KEY AUTOINCREMENT,
    key     TEXT NOT NULL UNIQUE,
    entry   INTEGER NOT NULL,
    by      TEXT NOT NULL,
    patch   BLOB NOT NULL,
    outcome TEXT NOT NULL,                   -- applied | deferred | reissued | expired
    made    TEXT NOT NULL DEFAULT '',        -- the entry that a reissue made
    at      REAL NOT NULL
);
CREATE INDEX amendments_of ON amendments (entry, seq);
CREATE INDEX amendments_deferred ON amendments (entry) WHERE outcome = 'deferred';

CREATE TABLE versions (
    run      TEXT NOT NULL,
    version  INTEGER NOT NULL,
    state    TEXT NOT NULL,                  -- reserved | committed | lost
    step     INTEGER NOT NULL,
    epoch    INTEGER NOT NULL,
    parent   INTEGER,
    line     INTEGER,
    digest   TEXT NOT NULL DEFAULT '',
    record   BLOB,                           -- msgpack of the WeightUpdate
    PRIMARY KEY (run, version)
) WITHOUT ROWID;
CREATE INDEX versions_line ON versions (run, line, version) WHERE state = 'committed';

CREATE TABLE control (
    id       INTEGER PRIMARY KEY AUTOINCREMENT,
    run      TEXT NOT NULL,
    action   TEXT NOT NULL,                  -- pause | resume | stop | set
    fields   BLOB NOT NULL,
    by       TEXT NOT NULL,
    at       REAL NOT NULL,
    acked_by TEXT,
    acked_at REAL,
    outcome  TEXT NOT NULL DEFAULT ''
);

CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
"""

VERSION_2 = """
CREATE INDEX IF NOT EXISTS entries_new ON entries (buffer, scope, class DESC, score DESC, ledger, seq)
    WHERE state = 'ready' AND granted = 0;
CREATE INDEX IF NOT EXISTS entries_again ON entries (buffer, scope, class, oldest_version DESC, ledger, seq)
    WHERE state = 'ready' AND granted > 0 AND granted < max_uses;

-- Flags are compared with 1: a bare integer is a condition in SQLite only.
DROP INDEX IF EXISTS admissions_due;
CREATE INDEX admissions_due ON admissions (run, seq) WHERE is_due = 1;

-- Of what task an entry is, and the mean size of its advantages: what priorities look at.
ALTER TABLE entries ADD COLUMN task TEXT NOT NULL DEFAULT '';
ALTER TABLE entries ADD COLUMN advantage REAL;
CREATE INDEX entries_age ON entries (buffer, scope, class, ledger, seq) WHERE state = 'ready' AND granted = 0;
CREATE INDEX entries_newest ON entries (buffer, scope, class, oldest_version DESC, ledger, seq)
    WHERE state = 'ready' AND granted = 0;

-- What was written out of the buffer, so that a deletion can reach it.
CREATE TABLE exports (
    manifest    TEXT PRIMARY KEY,
    at          REAL NOT NULL,
    num_entries INTEGER NOT NULL,
    filter      TEXT NOT NULL
);
"""

VERSION_3 = """
-- What entries hold, by hash, so that an import finds duplicates without reading the buffer. Filled by imports.
CREATE TABLE contents (entry INTEGER NOT NULL UNIQUE, buffer TEXT NOT NULL, hash TEXT NOT NULL);
CREATE INDEX contents_hash ON contents (buffer, hash);
CREATE INDEX contents_entry ON contents (buffer, entry);
"""

VERSION_4 = """
-- Where segments of large blobs are: one row once there are any. `url` may be relative to a SQLite file's folder.
CREATE TABLE segment_store (buffer TEXT NOT NULL, url TEXT NOT NULL);

-- Their files. `wiped`: how many of its unreferenced bytes were overwritten.
CREATE TABLE segments (name TEXT PRIMARY KEY, wiped INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID;

-- Revisions whose blob is empty because it is there.
CREATE TABLE segment_blobs (
    entry    INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    segment  TEXT NOT NULL,
    start    INTEGER NOT NULL,
    size     INTEGER NOT NULL,
    crc      INTEGER NOT NULL,
    PRIMARY KEY (entry, revision)
) WITHOUT ROWID;
CREATE INDEX segment_blobs_of ON segment_blobs (segment, start);
"""

VERSION_5 = """
-- Hashes of what was deleted, so that no import brings it back.
CREATE TABLE deleted (mark TEXT PRIMARY KEY) WITHOUT ROWID;
"""

MIGRATIONS: tuple[str, ...] = (VERSION_1, VERSION_2, VERSION_3, VERSION_4, VERSION_5)
"""`MIGRATIONS[n]` leads from version n to n + 1, in SQLite's dialect; other backends translate the types.

A published one never changes: a change of the tables is one more.
"""

SCHEMA_VERSION = len(MIGRATIONS)


def bring_up(
    execute: Callable[[str], Any], tables: Collection[str], where: str, migrations: tuple[str, ...] | None = None
) -> None:
    """Bring the tables to the newest version; call it inside a transaction.

    Args:
        execute: Runs one statement of SQLite's dialect and returns a cursor.
        tables: Names of the tables that are there.
        where: The file or server, for messages.
        migrations: Another list than `MIGRATIONS`, for tests.

    Raises:
        StoreError: It is a database of something else, or of a newer Triune.
    """
    steps = MIGRATIONS if migrations is None else migrations
    version = _version(execute, tables, where)
    if version > len(steps):
        raise StoreError(
            where,
            f"buffer schema {version}",
            f"schema {len(steps)} or older",
            "open it with the Triune that wrote it, or a newer one",
        )
    for step in steps[version:]:
        for statement in statements(step):
            execute(statement)
    if version < len(steps):
        execute("DELETE FROM schema_version")
        execute(f"INSERT INTO schema_version VALUES ({len(steps)})")


def is_brought_up(execute: Callable[[str], Any], tables: Collection[str], where: str) -> bool:
    """Whether the tables are those of the newest version; raises StoreError as `bring_up` does."""
    return _version(execute, tables, where) == SCHEMA_VERSION


def _version(execute: Callable[[str], Any], tables: Collection[str], where: str) -> int:
    if not tables:
        return 0
    row = execute("SELECT version FROM schema_version").fetchone() if "schema_version" in tables else None
    if row is None:
        raise StoreError(where, "a database of another program", "a buffer of Triune", "name another one")
    return int(row[0])


def statements(script: str) -> list[str]:
    """The single statements of a script, without comments."""
    lines = [line.partition("--")[0] for line in script.splitlines()]
    return [statement.strip() for statement in "\n".join(lines).split(";") if statement.strip()]
