"""The store on a server: several machines, several runs, many writers."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from triune.errors import ConfigError, MissingDependency, StoreError
from triune.registry import brick

if TYPE_CHECKING:
    from triune.buffer.postgres import PostgresDatabase

MARK = "buffer.postgres"
"""File in a run's folder that names its schema, so that the buffer moves with the folder as a file would."""


@brick("store")
@dataclass(frozen=True, kw_only=True)
class Postgres:
    """A PostgreSQL database, version 13 or newer. Needs `pip install 'triune[postgres]'`.

    One schema is one buffer: who names the same `schema` shares it. Waiting processes are woken by the server; nothing
    polls. What was acknowledged survives whatever the server survives.
    """

    url: str = ""
    """`postgresql://USER@HOST:PORT/DATABASE`, without a password; empty = libpq's variables (PGHOST, PGDATABASE, …)."""
    schema: str | None = None
    """Where the tables are; null = one made for this run and named in its folder. Who does not see that names it."""
    busy_timeout_s: float = 30.0
    """How long to wait for another process's transaction."""
    reconnect_s: float = 60.0
    """How long calls wait for a server that is gone before they fail."""

    def __post_init__(self) -> None:
        try:
            has_password = urlsplit(self.url).password is not None
        except ValueError:
            has_password = False  # libpq will say what is wrong with it
        if has_password or re.search(r"\bpassword\s*=", self.url):
            raise ConfigError(
                "buffer.store.url",
                "a password, which would be copied into the run's folder",
                "a URL without one",
                "put it into ~/.pgpass or PGPASSWORD",
            )
        if self.schema is not None and not 0 < len(self.schema.encode()) < 64:
            raise ConfigError("buffer.store.schema", f"found {self.schema!r}", "a name of 1 to 63 bytes")

    def __call__(
        self, folder: Path, clock: Callable[[], float] | None = None, *, makes: bool = True
    ) -> PostgresDatabase:
        """Connect, and make the schema when it is missing, unless `makes` says no."""
        try:
            from triune.buffer.postgres import PostgresDatabase
        except ImportError as error:
            raise MissingDependency(
                "buffer.store", f"psycopg is not installed ({error})", "", "pip install 'triune[postgres]'"
            ) from error
        return PostgresDatabase(
            self.url,
            self.schema or _schema_of(folder),
            busy_timeout_s=self.busy_timeout_s,
            patience_s=self.reconnect_s,
            clock=clock,
            makes=makes,
        )


def _schema_of(folder: Path) -> str:
    """The schema that the folder names; it names a new one first where it names none."""
    mark, partial = folder / MARK, folder / f"{MARK}.{uuid.uuid4().hex}"
    try:
        if not mark.exists():
            name = re.sub(r"[^a-z0-9]+", "_", folder.resolve().name.lower())[:40]
            partial.write_text(f"triune_{name}_{uuid.uuid4().hex[:8]}\n")
            try:
                os.link(partial, mark)  # one of several processes wins
            except FileExistsError:
                pass
            finally:
                partial.unlink()
        return mark.read_text().strip()
    except OSError as error:
        raise StoreError(
            str(mark), f"cannot be written ({error.strerror})", "the run's folder", "name buffer.store.schema"
        ) from error
