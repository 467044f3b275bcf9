"""Files of older versions are brought up, as a whole or not at all."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path

import pytest

from triune.buffer import BufferSettings, open_buffer, open_database
from triune.buffer.database import Database
from triune.buffer.schema import MIGRATIONS, SCHEMA_VERSION, bring_up
from triune.errors import StoreError

VERSION_1 = Path(__file__).parents[2] / "data" / "buffer_version_1.sql"
"""What the first version wrote: a run with a leased, a ready and a spent entry, one of which was amended."""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "buffer.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript(VERSION_1.read_text(encoding="utf-8"))
    connection.close()
    return path


def version_of(path: Path) -> int:
    connection = sqlite3.connect(path)
    [(version,)] = connection.execute("SELECT version FROM schema_version").fetchall()
    connection.close()
    return version


def shape_of(db: Database) -> list[tuple[str, str]]:
    """Every table's columns and every index's statement."""
    names = db.all("SELECT name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%' ORDER BY name")
    columns = {name: str(db.all(f"PRAGMA table_info({name})")) for name, sql in names if sql.startswith("CREATE TABLE")}
    return [(name, columns.get(name, sql.replace("IF NOT EXISTS ", ""))) for name, sql in names]


def test_a_file_of_version_1_is_brought_up_and_keeps_what_is_in_it(old: Path, tmp_path: Path):
    async def work() -> None:
        buffer = open_buffer(BufferSettings(), tmp_path)
        assert await buffer.open_run("r", config_hash="", data_hash="") == 1
        await buffer.check_conservation()
        states = {info.entry: (info.state.value, info.reward) for info in await buffer.browse()}
        assert states == {
            "r/train/t0/0": ("spent", 0.5),
            "r/train/t1/0": ("ready", 0.5),
            "r/train/t2/0": ("ready", 0.75),
        }
        assert [a["by"] for a in await buffer.amendments("r/train/t2/0")] == ["ann"]
        uses = [("r/train/t0/0", 1)]
        await buffer.resume_at(step=1, version=0, consumed=uses, checkpoint="step-1", strict=True)
        assert {lease.entry for lease in await buffer.lease(9, wait=False)} == {"r/train/t1/0", "r/train/t2/0"}
        await buffer.close()

    assert version_of(old) == 1
    asyncio.run(work())
    assert version_of(old) == SCHEMA_VERSION


def test_a_file_that_was_brought_up_has_the_shape_of_a_new_one(old: Path, tmp_path: Path):
    brought, new = open_database(old), open_database(tmp_path / "new.sqlite")
    assert shape_of(brought) == shape_of(new)
    brought.close()
    new.close()


def test_a_migration_that_fails_leaves_the_file_as_it_was(old: Path):
    db = open_database(old)
    before = shape_of(db)
    broken = (*MIGRATIONS, "ALTER TABLE entries ADD COLUMN colour TEXT; CREATE TABLE half (a); DROP TABLE nowhere")
    with pytest.raises(StoreError, match="no such table: nowhere"), db.transaction():
        bring_up(db.execute, ["schema_version"], "here", broken)
    assert shape_of(db) == before
    assert version_of(old) == SCHEMA_VERSION
    fine = (*MIGRATIONS, "ALTER TABLE entries ADD COLUMN colour TEXT")
    with db.transaction():
        bring_up(db.execute, ["schema_version"], "here", fine)
    assert version_of(old) == SCHEMA_VERSION + 1
    db.close()
    with pytest.raises(StoreError, match=rf"buffer schema {SCHEMA_VERSION + 1}; expected schema {SCHEMA_VERSION} or"):
        open_database(old)


def test_many_processes_may_bring_one_file_up_at_once(old: Path):
    failures: list[BaseException] = []

    def open_it() -> None:
        try:
            open_database(old).close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=open_it) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert version_of(old) == SCHEMA_VERSION
