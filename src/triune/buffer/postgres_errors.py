"""PostgreSQL's errors in words."""

from __future__ import annotations

import re

import psycopg

from triune.buffer.database import Interrupted
from triune.errors import StoreError

_EXPECTED = "a PostgreSQL server that answers and may be written"
_KEPT = "what was committed is kept"

_GONE = ("08", "57P")
"""Classes of states in which the server ended the connection: nothing that was not committed has happened."""

_STOPPED = {
    "40001": "stopped in favour of another transaction",
    "40P01": "stopped, two transactions waited for each other",
    "25P03": "held the store too long without a statement and was stopped by the server",
}
"""States in which the server undid one transaction, which may be repeated."""

_MEANINGS = {
    "53100": ("the server's disk is full", f"free space and resume; {_KEPT}"),
    "53200": ("the server is out of memory", f"give it more and resume; {_KEPT}"),
    "53300": ("the server has no connection left", "raise its max_connections, or end idle clients"),
    "55P03": (
        "locked for too long",
        "find the process that holds it in pg_stat_activity, or raise buffer.store.busy_timeout_s",
    ),
    "42501": ("not allowed", "ask for CREATE on the database, or name a schema that you own in buffer.store.schema"),
    "25006": ("may only be read", "name the primary server in buffer.store.url"),
    "42P01": ("a table is missing", "has somebody dropped it? Name another buffer.store.schema, or restore it"),
    "22021": ("text that PostgreSQL cannot store", "use no zero characters in names of tasks and tags"),
    "22P05": ("text that the database's encoding cannot store", "make the database with ENCODING 'UTF8'"),
    "58030": ("the server's disk failed", f"check the disk and its quota, then resume; {_KEPT}"),
    "XX001": ("the database is damaged", "restore it from a backup, or salvage tables with pg_dump"),
    "XX002": ("an index is damaged", "REINDEX the schema, then resume"),
}

_RETURNING = "starting up|yet accepting connections|recovery mode"
"""What a server says that is on its way back, however long its recovery takes."""

_REFUSALS = (
    ("password authentication failed", "the password is wrong", "correct it in ~/.pgpass or PGPASSWORD"),
    ("no password supplied", "a password is needed", "put it into ~/.pgpass or PGPASSWORD"),
    ("no pg_hba.conf entry", "the server lets nobody in from here", "add a line to its pg_hba.conf"),
    ("authentication failed", "the server does not believe who we are", "check user and method in its pg_hba.conf"),
    (
        'role ".*" does not exist',
        "there is no such user",
        "make it with `createuser`, or name another in buffer.store.url",
    ),
    (
        'database ".*" does not exist',
        "there is no such database",
        "make it with `createdb`, or name another in buffer.store.url",
    ),
)
"""What the server says to somebody it does not let in, who need not ask again."""

_ABSENCES = (
    (_RETURNING, "the server is starting", "wait a moment"),
    ("shutting down", "the server is stopping", "start it again"),
    ("too many clients", "the server has no connection left", "raise its max_connections, or end idle clients"),
    ("remaining connection slots", "the server has no connection left", "raise its max_connections"),
    ("resolve host", "there is no such host", "correct it in buffer.store.url"),
    ("translate host name", "there is no such host", "correct it in buffer.store.url"),
)


def is_returning(error: StoreError) -> bool:
    """Whether there was no connection because the server recovers or starts."""
    return re.search(_RETURNING, error.found) is not None


def cannot_connect(error: psycopg.Error, where: str) -> StoreError:
    """Why there is no connection: a refusal, or (`Interrupted`) a server that may come back."""
    text = _one_line(error)
    for pattern, found, do in _ABSENCES:
        if re.search(pattern, text):
            return Interrupted(where, f"{found} ({text})", _EXPECTED, do)
    if "FATAL" in text:
        for pattern, found, do in _REFUSALS:
            if re.search(pattern, text):
                return StoreError(where, f"{found} ({text})", _EXPECTED, do)
    do = "start the server, or correct buffer.store.url"
    return Interrupted(where, f"the server does not answer ({text})", _EXPECTED, do)


def store_error(error: psycopg.Error, where: str, *, is_gone: bool) -> StoreError:
    """What stopped a statement; `Interrupted` where its transaction may be repeated."""
    text, state = _one_line(error), error.sqlstate or ""
    if is_gone or state.startswith(_GONE):
        return Interrupted(where, f"the connection broke ({text})", _EXPECTED, f"resume; {_KEPT}")
    if state in _STOPPED:
        return Interrupted(where, f"{_STOPPED[state]} ({text})", _EXPECTED, f"resume; {_KEPT}")
    if "NUL" in text and not state:
        state = "22021"
    found, do = _MEANINGS.get(state, (type(error).__name__, f"resume; {_KEPT}"))
    return StoreError(where, f"{found} ({text})", _EXPECTED, do)


def _one_line(error: psycopg.Error) -> str:
    return " ".join(str(error).split())
