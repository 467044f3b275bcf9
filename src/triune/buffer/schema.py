"""The tables, and the version they are of."""

from __future__ import annotations

import sqlite3

from triune.errors import StoreError

SCHEMA_VERSION = 1

TABLES = """
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
CREATE INDEX admissions_due ON admissions (run, seq) WHERE is_due;

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
CREATE INDEX IF NOT EXISTS entries_new ON entries (buffer, scope, class DESC, score DESC, ledger, seq)
    WHERE state = 'ready' AND granted = 0;
CREATE INDEX IF NOT EXISTS entries_again ON entries (buffer, scope, class, oldest_version DESC, ledger, seq)
    WHERE state = 'ready' AND granted > 0 AND granted < max_uses;
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


def prepare_schema(connection: sqlite3.Connection, where: str) -> None:
    """Make the tables in an empty database; refuse one of another version.

    Raises:
        StoreError: The file is a database of something else, or of a newer Triune.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not tables:
            for statement in _statements():
                connection.execute(statement)
            connection.execute("INSERT INTO schema_version VALUES (?)", (SCHEMA_VERSION,))
        elif "schema_version" not in tables:
            raise StoreError(where, "a database of another program", "a buffer of Triune", "name another file")
        else:
            (version,) = connection.execute("SELECT version FROM schema_version").fetchone()
            if version != SCHEMA_VERSION:
                raise StoreError(
                    where,
                    f"buffer schema {version}",
                    f"schema {SCHEMA_VERSION}",
                    "open it with the Triune that wrote it",
                )
            for statement in _statements():
                if "CREATE INDEX IF NOT EXISTS" in statement:  # they came later, and change nothing stored
                    connection.execute(statement)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _statements() -> list[str]:
    lines = [line.partition("--")[0] for line in TABLES.splitlines()]
    return [statement for statement in "\n".join(lines).split(";") if statement.strip()]
