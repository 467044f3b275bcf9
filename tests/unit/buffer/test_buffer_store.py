"""Files that are no buffer, disks that fail, overlays, heartbeats, and moving entries as JSON lines."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from triune.buffer import BufferSettings, OpenBuffer, Store, from_plain, open_buffer, open_database, to_plain
from triune.buffer.overlay import apply_overlay, compare, encode_overlay
from triune.buffer.stores.memory import Memory
from triune.buffer.stores.sqlite import SQLite
from triune.errors import ConfigError, RecordError, StoreError, WireError
from triune.ports import AdmissionRule
from triune.records import Group, GroupId, Pair, Source, Task, Text, decode_group, encode_group
from triune.registry import build
from triune.testing.filled_stores import make_store
from triune.testing.groups import make_group, with_mean_advantages

ID = GroupId("r", "train", "a", 0)


# ----------------------------------------------------------------------------------------- files that fail


def test_a_missing_folder_is_named_with_what_to_do(tmp_path: Path):
    with pytest.raises(StoreError, match=r"its folder does not exist; make .*none or change buffer.store.path"):
        open_database(tmp_path / "none" / "buffer.sqlite")


def test_a_file_that_is_no_database_is_refused_and_left_as_it_was(tmp_path: Path):
    path = tmp_path / "notes.txt"
    path.write_text("milk, eggs and " * 100)
    with pytest.raises(StoreError, match=r"not a database .*; expected .*; name another file"):
        open_database(path)
    assert path.read_text() == "milk, eggs and " * 100


def test_a_database_of_another_program_or_a_newer_schema_is_refused(tmp_path: Path):
    other = sqlite3.connect(tmp_path / "other.sqlite")
    other.execute("CREATE TABLE photos (id)")
    other.commit()
    with pytest.raises(StoreError, match="a database of another program"):
        open_database(tmp_path / "other.sqlite")
    open_database(tmp_path / "ours.sqlite").close()
    newer = sqlite3.connect(tmp_path / "ours.sqlite")
    newer.execute("UPDATE schema_version SET version = 99")
    newer.commit()
    with pytest.raises(StoreError, match=r"buffer schema 99; expected schema \d+ or older"):
        open_database(tmp_path / "ours.sqlite")


@pytest.mark.parametrize(("synchronous", "flushes"), [("normal", True), ("full", False), ("off", False)])
def test_securing_flushes_the_log_where_a_commit_did_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synchronous: str, flushes: bool
):
    flushed: list[Path] = []
    database = open_database(tmp_path / "buffer.sqlite", synchronous=synchronous)
    with database.transaction():
        database.execute("INSERT INTO counters(name, value) VALUES ('written', 1)")
    monkeypatch.setattr(
        "triune.buffer.sqlite.os.fsync", lambda fd: flushed.append(Path(f"/proc/self/fd/{fd}").resolve())
    )
    database.secure()
    database.close()
    assert flushed == ([tmp_path / "buffer.sqlite-wal", tmp_path] if flushes else [])


def test_a_log_that_cannot_be_flushed_is_told_before_a_checkpoint_relies_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fails(_: int) -> None:
        raise OSError(5, "Input/output error")

    database = open_database(tmp_path / "buffer.sqlite")
    with database.transaction():
        database.execute("INSERT INTO counters(name, value) VALUES ('written', 1)")
    monkeypatch.setattr("triune.buffer.sqlite.os.fsync", fails)
    with pytest.raises(StoreError, match=r"its log cannot be flushed .*Input/output error"):
        database.secure()
    database.close()


def test_a_damaged_database_says_so_and_how_to_salvage_it(tmp_path: Path):
    async def fill() -> None:
        buffer = open_buffer(BufferSettings(), tmp_path)
        await buffer.open_run("r", config_hash="", data_hash="")
        for number in range(30):
            group = make_group(GroupId("r", "train", str(number), 0), answer=200)
            await buffer.put(group, group)
        await buffer.close()

    asyncio.run(fill())
    path = tmp_path / "buffer.sqlite"
    content = bytearray(path.read_bytes())
    content[8192:] = bytes(b ^ 0xA5 for b in content[8192:])
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"the database is damaged .* salvage"):
        _read_all(path)


def _read_all(path: Path) -> Any:
    store = Store(open_database(path))
    with store.db.transaction():
        return store.entries.browse(None, None, 100)


def test_a_database_locked_for_too_long_says_so_and_the_call_can_be_repeated(tmp_path: Path):
    async def work() -> None:
        buffer = open_buffer(BufferSettings(store=SQLite(busy_timeout_s=0.05)), tmp_path)
        await buffer.open_run("r", config_hash="", data_hash="")
        other = sqlite3.connect(tmp_path / "buffer.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match=r"locked for too long .*busy_timeout_s"):
            await buffer.put(make_group(ID))
        other.execute("ROLLBACK")
        assert await buffer.put(make_group(ID)) == "r/train/a/0"
        await buffer.close()

    asyncio.run(work())


def test_looking_neither_waits_for_who_writes_nor_stops_them(tmp_path: Path):
    path = make_store(tmp_path)
    other = sqlite3.connect(path, isolation_level=None, timeout=0)
    other.execute("BEGIN IMMEDIATE")
    with OpenBuffer(Store(open_database(path, busy_timeout_s=0.05))) as buffer:
        assert len(buffer.query("state = ready")) == 2
        assert buffer.stats().totals["puts"] == 5
        assert len(buffer.step(1, run="r")) == 1
        other.execute("ROLLBACK")
        met = list[int]()

        def write_meanwhile(sql: str, parameters: Any = (), read: Any = buffer.store.db.all) -> Any:
            if "integrity_check" in sql or "FROM amendments a" in sql:
                met.append(other.execute("UPDATE runs SET opener = opener").rowcount)
            return read(sql, parameters)

        buffer.store.db.all = write_meanwhile  # type: ignore[method-assign]
        assert buffer.verify().findings == ()
        assert met == [1] * 3
    other.close()


def test_many_processes_may_open_a_new_file_at_once(tmp_path: Path):
    failures: list[BaseException] = []

    def open_it() -> None:
        try:
            open_database(tmp_path / "buffer.sqlite").close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=open_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# ---------------------------------------------------------------------------------------------- settings


def test_the_store_is_a_brick_and_its_path_defaults_to_the_run_s_folder(tmp_path: Path):
    assert BufferSettings.model_validate({"store": "memory"}).store == Memory()
    settings = BufferSettings.model_validate({"store": {"use": "sqlite", "path": str(tmp_path / "x.db")}})
    settings.store(tmp_path).close()
    assert (tmp_path / "x.db").exists()
    BufferSettings().store(tmp_path).close()
    assert (tmp_path / "buffer.sqlite").exists()
    with pytest.raises(ConfigError, match="did you mean 'path'"):
        build("store", {"use": "sqlite", "pth": "x"}, "buffer.store")


def test_leases_outlive_their_time_as_long_as_the_process_does(tmp_path: Path):
    async def work() -> None:
        buffer = open_buffer(BufferSettings(lease_s=0.15), tmp_path)
        await buffer.open_run("r", config_hash="", data_hash="")
        await buffer.put(make_group(ID), make_group(ID))
        await buffer.lease(1)
        await asyncio.sleep(0.5)
        assert await buffer.lease(1, wait=False) == []
        assert (await buffer.stats())["uses/leased"] == 1
        await buffer.close()

    asyncio.run(work())


# ---------------------------------------------------------------------------------------------- overlays


def test_an_overlay_of_a_usual_pipeline_is_a_fraction_of_the_group():
    raw = make_group(ID, rewards=[float(n % 2) for n in range(8)], prompt=60, answer=40)
    shaped = with_mean_advantages(raw)
    assert shaped is not None
    difference = compare(raw, shaped)
    assert difference is not None
    assert difference.names == {"streams", "operators"}
    assert len(encode_overlay(raw, shaped, difference)) < 0.5 * len(encode_group(shaped))


@pytest.mark.parametrize(
    "change",
    [
        lambda e: e.replace(reward=0.25, reward_parts={"exact": 1.0, "length": -0.75}),
        lambda e: e.replace(is_valid=False, metrics={"chars": 3.0}),
        lambda e: e.replace(info={"deep": [1, {"x": None}]}, parents=("p",), priority=2.5),
        lambda e: e.with_streams(values=np.ones((len(e), 3), np.float32), teacher_ids=np.ones(len(e), np.int32)),
        lambda e: e.replace(raw_logprobs=e.logprobs.copy(), source=Source.EXPERT),
        lambda e: e if e.member else e.replace(turns=()),
    ],
)
def test_what_an_operator_changed_comes_back_from_the_overlay(change: Any):
    raw = decode_group(encode_group(make_group(ID, rewards=(1.0, 0.0, 0.5))))
    shaped = raw.with_records([change(row) for row in reversed(raw.experiences)])
    difference = compare(raw, shaped)
    assert difference is not None
    got = apply_overlay(raw, encode_overlay(raw, shaped, difference))
    assert encode_group(got) == encode_group(shaped)


def test_streams_that_an_operator_removed_are_gone():
    with_stream = make_group(ID).map(lambda e: e.with_streams(values=np.ones(len(e), np.float32)))
    without = with_stream.map(lambda e: e.replace(streams={}))
    difference = compare(with_stream, without)
    assert difference is not None
    got = apply_overlay(with_stream, encode_overlay(with_stream, without, difference))
    assert all(row.streams == {} for row in got.experiences)


def test_other_prompts_tasks_or_records_are_stored_whole():
    raw = make_group(ID)
    one = raw.experiences[0]
    for shaped in (
        raw.with_records([one.replace(messages=())]),
        raw.with_records([one.replace(temperature=0.5)]),
        raw.with_records([make_group(GroupId("r", "train", "b", 0)).experiences[0]]),
        raw.with_records([Text(id="t", tokens=np.zeros(2, np.int32))]),
    ):
        assert compare(raw, shaped) is None


def test_an_overlay_of_something_else_is_refused():
    with pytest.raises(WireError, match="an overlay of this group"):
        apply_overlay(make_group(ID), b"\x00\x01")


def test_what_cannot_be_stored_is_refused_before_anything_is_written(tmp_path: Path):
    async def work() -> None:
        buffer = open_buffer(BufferSettings(store=Memory()), tmp_path)
        await buffer.open_run("r", config_hash="", data_hash="")
        raw = make_group(ID)
        for shaped, found in (
            (raw.map(lambda e: e.replace(info={"f": open})), "not a JSON-like value"),
            (raw.map(lambda e: e.with_streams(advantages=np.ones(3, np.float32))), "first axis 10"),
            (raw.map(lambda e: e.replace(reward=float("inf"))), "a finite number"),
            (raw.map(lambda e: e.replace(versions=np.zeros(len(e), np.int32))), "outside the action mask"),
        ):
            with pytest.raises(RecordError, match=found):
                await buffer.put(raw, shaped)
        assert (await buffer.stats())["puts"] == 0
        await buffer.close()

    asyncio.run(work())


# --------------------------------------------------------------------------------------------- JSON lines


def test_pairs_and_texts_survive_the_way_through_json():
    chosen, rejected = make_group(ID).experiences
    records = (
        Pair(chosen=chosen, rejected=rejected, margin=0.5, by="ann"),
        Text(id="t", tokens=np.arange(4, dtype=np.int32)),
    )
    group = Group(id=ID, task=Task(key="a", data={"q": [1, 2.5, None]}), records=records, info={"x": "y"})
    back = from_plain(json.loads(json.dumps(to_plain(group))))
    assert encode_group(back) == encode_group(group)


def test_pairs_can_be_put_and_leased(tmp_path: Path):
    async def work() -> None:
        buffer = open_buffer(BufferSettings(store=Memory()), tmp_path)
        await buffer.open_run("r", config_hash="", data_hash="")
        chosen, rejected = make_group(ID).experiences
        group = make_group(ID).with_records([Pair(chosen=chosen, rejected=rejected)])
        await buffer.put(group, group, buffer="preferences")
        [lease] = await buffer.lease(1, buffer="preferences")
        assert isinstance(lease.group.records[0], Pair)
        await buffer.close()

    asyncio.run(work())


def test_a_line_that_is_no_entry_is_named_by_its_number(tmp_path: Path):
    async def work() -> None:
        buffer = open_buffer(BufferSettings(store=Memory()), tmp_path)
        path = tmp_path / "in.jsonl"
        path.write_text("\n{broken\n")
        with pytest.raises(RecordError, match=r"in.jsonl:2"):
            await buffer.import_jsonl(path, buffer="past")
        path.write_text('{"state": "ready", "group": {"id": "r/train/a/0"}}\n')
        with pytest.raises(RecordError, match="a group as `to_plain` writes it"):
            await buffer.import_jsonl(path, buffer="past")
        with pytest.raises(StoreError, match="cannot be read"):
            await buffer.import_jsonl(tmp_path / "none.jsonl", buffer="past")
        await buffer.close()

    asyncio.run(work())


# ------------------------------------------------------------------------------------------------- memory


def test_case_48_the_buffer_holds_no_more_groups_after_many_steps(tmp_path: Path):
    async def work() -> None:
        buffer = open_buffer(BufferSettings(store=SQLite(synchronous="off")), tmp_path)
        await buffer.open_run("r", config_hash="", data_hash="")
        rule = AdmissionRule(max_staleness=0, fresh=1e6)
        for step in range(100):
            group = await buffer.admit(Task(key=str(step)), rule)
            assert group is not None
            raw = make_group(group)
            await buffer.put(raw, with_mean_advantages(raw))
            [lease] = await buffer.lease(1)
            await buffer.ack([(lease.entry, 1)], checkpoint="c", step=step)
        assert len(buffer._fresh) == 0
        assert len(buffer._waiters) == 0
        await buffer.close()

    asyncio.run(work())
