"""An import finds duplicates by an index of hashes, and reads of the buffer only what it has not seen yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import triune.buffer
from triune.buffer import OpenBuffer, StoredBuffer
from triune.buffer.contents import Contents
from triune.buffer.entry_walk import read_entry
from triune.buffer.imports import Imported, import_file
from triune.buffer.query_parser import parse_filter
from triune.buffer.redaction import delete
from triune.records import GroupId
from triune.testing.filled_stores import in_buffer
from triune.testing.groups import make_group

NUM = 5


def group(number: int, run: str = "r") -> Any:
    """Its content depends on the number alone."""
    return make_group(GroupId(run, "t", f"k{number}", number))


def stock(folder: Path, run: str, numbers: range, buffer: str) -> OpenBuffer:
    async def work(stored: StoredBuffer) -> None:
        await stored.open_run(run, config_hash="", data_hash="")
        await stored.stock([group(number, run) for number in numbers], buffer=buffer)

    in_buffer(folder, work)
    return triune.buffer.open(folder / "buffer.sqlite")


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    with stock(tmp_path / "source", "r", range(NUM), "past") as source:
        source.export(tmp_path / "out.jsonl")
    return tmp_path / "out.jsonl"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Entries that were read to be hashed."""
    found: list[str] = []

    def note(store: Any, row: Any, revision: int | None = None) -> Any:
        found.append(row.entry)
        return read_entry(store, row, revision)

    monkeypatch.setattr("triune.buffer.contents.read_entry", note)
    return found


def imported(buffer: OpenBuffer, path: Path, into: str = "past") -> Imported:
    return import_file(buffer.store, path, into=into, reader=lambda *_: [])


@pytest.mark.parametrize(("page", "batch"), [(2, 1), (2, 3), (256, 256)])
def test_what_another_run_put_is_a_duplicate_and_is_read_once_for_all_imports(
    exported: Path, tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch, page: int, batch: int
):
    for name in ("entry_walk", "contents"):
        monkeypatch.setattr(f"triune.buffer.{name}.PAGE", page)
    monkeypatch.setattr("triune.buffer.imports.BATCH", batch)
    with stock(tmp_path / "target", "s", range(3, 8), "past") as target:
        found = imported(target, exported)
        assert (found.num_new, found.num_duplicate) == (3, 2)
        assert read == [f"s/t/k{n}/{n}" for n in range(3, 8)]
        found = imported(target, exported)
        assert (found.num_new, found.num_duplicate) == (0, NUM)
        assert len(read) == NUM, "nothing new had come"
        assert imported(target, exported, into="other").num_new == NUM, "each buffer has its own"
        assert target.verify().findings == ()


def test_what_is_put_between_two_imports_is_found_by_the_second(exported: Path, tmp_path: Path, read: list[str]):
    with stock(tmp_path / "target", "s", range(0), "past") as target:
        assert imported(target, exported).num_new == NUM
    with stock(tmp_path / "target", "s", range(NUM, 7), "past") as target, target.store.db.transaction():
        contents = Contents(target.store, "past")
        assert contents.hash_page() == 2
        assert read == ["s/t/k5/5", "s/t/k6/6"]


def test_what_a_run_puts_while_an_import_is_under_way_is_not_stored_twice(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Contents, "catch_up", lambda self: None)  # it was put after this look
    with stock(tmp_path / "target", "s", range(3), "past") as target:
        found = imported(target, exported)
        assert (found.num_new, found.num_duplicate) == (NUM - 3, 3)


def test_the_hash_of_what_was_deleted_is_deleted_too(exported: Path, tmp_path: Path):
    with stock(tmp_path / "target", "s", range(0), "past") as target:
        imported(target, exported)
        delete(target.store, parse_filter("task_key = k1"), by="dpo", is_dry=False)
        numbers = target.store.db.all("SELECT e.entry FROM contents c JOIN entries e ON e.seq = c.entry")
        assert len(numbers) == NUM - 1
        found = imported(target, exported)
        assert (found.num_duplicate, found.num_refused) == (NUM - 1, 1)


def test_an_entry_twice_in_a_file_is_stored_once(exported: Path, tmp_path: Path):
    twice = tmp_path / "twice.jsonl"
    twice.write_text(2 * exported.read_text())
    with stock(tmp_path / "target", "s", range(0), "past") as target:
        found = imported(target, twice)
        assert (found.num_new, found.num_duplicate) == (NUM, NUM)
