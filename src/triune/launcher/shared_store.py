"""A store beside the run's folder outlives it: a run's name there belongs to what was experienced under it."""

from __future__ import annotations

from pathlib import Path

from triune.buffer import Database
from triune.buffer.stores.postgres import Postgres
from triune.buffer.stores.sqlite import SQLite
from triune.config import RunConfig
from triune.errors import ConfigError


def check_name_is_free(config: RunConfig) -> None:
    """Refuse to begin a run in a shared store that holds the experience of one of its name.

    It would take the other over: stop it where it lives, and return what it was trained on. A run that left nothing
    there may be tried again.

    Raises:
        ConfigError: The name is taken; nothing was changed.
        StoreError: The store cannot be opened.
    """
    db = _open_shared(config)
    if db is None:
        return
    try:
        with db.transaction():
            row = db.one(
                "SELECT r.admitted, (SELECT count(*) FROM uses u WHERE u.consumer = r.run AND u.state != 'returned') "
                "FROM runs r WHERE r.run = ?",
                (config.name,),
            )
    finally:
        db.close()
    if row is not None and any(row):
        raise ConfigError(
            "name",
            f"a run {config.name!r} is in {db.where} already: {row[0]} groups admitted, {row[1]} entries used",
            "a name of its own for every run of a store that outlives its folder",
            f"set name=…; or, where {config.run_dir} is still there, go on with --resume",
        )


def _open_shared(config: RunConfig) -> Database | None:
    """The store, where the run file says where it is and it is there; None where it is in the run's folder."""
    store = config.buffer.store
    if isinstance(store, SQLite) and store.path is not None:
        path = Path(store.path)
        is_elsewhere = config.run_dir.resolve() not in path.resolve().parents
        return store(config.run_dir) if is_elsewhere and path.is_file() else None
    return store(config.run_dir) if isinstance(store, Postgres) and store.schema is not None else None
