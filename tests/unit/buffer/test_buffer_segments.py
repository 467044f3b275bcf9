"""Large blobs in segments: what is written, what a crash leaves, what damage does, and what a deletion leaves."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import triune.buffer
from triune.buffer import BufferSettings, SegmentSettings, StoredBuffer, open_buffer, segments
from triune.buffer.notebook import OpenBuffer, verify_at
from triune.buffer.query import equals
from triune.buffer.redaction import delete
from triune.buffer.segments_gc import reclaim
from triune.buffer.stores.memory import Memory
from triune.buffer.stores.postgres import Postgres
from triune.buffer.stores.sqlite import SQLite
from triune.errors import ConfigError, MissingDependency, StoreError
from triune.failpoints import arm_failpoints
from triune.records import GroupId, Task
from triune.testing import filled_stores, postgres
from triune.testing.buffers import ROOMY, BufferWorld, fill, run, states
from triune.testing.groups import make_group, with_mean_advantages

ALL = SegmentSettings(min_bytes=0)
SECRET = b"secret of ann"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[BufferWorld]:
    found = BufferWorld(SQLite(), tmp_path, ALL)
    yield found
    found.end()


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.seg"))


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def findings(folder: Path) -> set[tuple[str, str]]:
    return {(found.check, found.entry) for found in verify_at(folder / "buffer.sqlite").findings}


def holds(folder: Path, text: bytes) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file() and text in path.read_bytes()]


def one(buffer: StoredBuffer, sql: str) -> Any:
    with buffer.store.db.transaction():
        return (buffer.store.db.one(sql) or (None,))[0]


# --------------------------------------------------------------------------------------- writing and reading


def test_revisions_of_at_least_min_bytes_are_in_a_segment_and_smaller_ones_in_their_rows(tmp_path: Path):
    async def work() -> None:
        world = BufferWorld(SQLite(), tmp_path)
        buffer = await world.start()
        await fill(buffer, 1)
        raw, shaped = (one(buffer, f"SELECT length(blob) FROM revisions WHERE revision = {n}") for n in (0, 1))
        assert raw > shaped
        large = await world.start(segments=SegmentSettings(min_bytes=raw))
        await fill(large, 1)
        sizes = "SELECT length(blob) FROM revisions WHERE entry = 2 AND revision = "
        assert (one(large, sizes + "0"), one(large, sizes + "1")) == (0, shaped)
        [path] = files(tmp_path)
        assert path.stat().st_size == raw
        assert (await large.stats())["segments/bytes"] == raw
        world.end()

    run(work())


def test_who_opens_the_store_without_settings_reads_what_is_in_segments(world: BufferWorld, tmp_path: Path):
    async def work() -> None:
        await filled_stores.fill(world.open())

    run(work())
    world.end()
    plain = filled_stores.make_store(tmp_path / "plain")
    with triune.buffer.open(tmp_path / "buffer.sqlite") as kept, triune.buffer.open(plain) as rows:
        assert [str(group) for group in kept.groups()] == [str(group) for group in rows.groups()]
        assert kept.why("r/train/t0/0").revisions == rows.why("r/train/t0/0").revisions
        assert [row.group.task_key for row in kept.entries("data.user_id = ann")] == ["t0", "t2"]
        assert kept.export(tmp_path / "all.jsonl").num_entries == 5
        kept_bytes, row_bytes = kept.verify(), rows.verify()
        assert kept_bytes.findings == () == row_bytes.findings
        assert (kept_bytes.num_blobs, kept_bytes.num_bytes) == (row_bytes.num_blobs, row_bytes.num_bytes)
        assert (kept_bytes.num_segments, kept_bytes.num_unreferenced_bytes) == (1, 0)
        assert kept.stats().totals["segments/num_blobs"] == 7


def test_segments_are_rolled_by_size_and_no_two_processes_write_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(segments, "AT_ONCE", 5)  # fewer than the second one has to read

    async def work() -> None:
        world = BufferWorld(SQLite(), tmp_path, SegmentSettings(min_bytes=0, roll_bytes=5000))
        first = await world.start()
        second = world.open()
        await second.join_run("r", timeout_s=1)
        for _ in range(6):
            await fill(first, 1)
            await fill(second, 1)
        await first.check_conservation()
        assert len(await second.lease(12)) == 12
        by_writer: dict[str, list[int]] = {}
        for path in files(tmp_path):
            by_writer.setdefault(path.name.split("-")[0], []).append(path.stat().st_size)
        assert len(by_writer) == 2
        assert all(size >= 5000 for sizes in by_writer.values() for size in sizes[:-1])
        assert sum(map(len, by_writer.values())) > 2
        world.end()

    run(work())


def test_what_a_transaction_kept_can_be_read_in_it_and_a_failed_one_writes_nothing(world: BufferWorld, tmp_path: Path):
    async def work() -> None:
        buffer = await world.start()
        [entry] = await fill(buffer, 1)
        size = files(tmp_path)[0].stat().st_size
        store, who = buffer.store, buffer._me()

        def revise_and_fail() -> None:
            with store.db.transaction():
                group = store.read(entry, None)
                store.entries.revise(who, entry, group.with_records(group.records[:1]), ())
                assert len(store.read(entry, None)) == 1
                raise RuntimeError

        with pytest.raises(RuntimeError):
            revise_and_fail()
        assert len(await buffer.read(entry)) == 2
        assert files(tmp_path)[0].stat().st_size == size

    run(work())


def test_a_put_whose_bytes_cannot_be_written_is_refused_and_the_next_one_goes_to_a_new_segment(
    world: BufferWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    async def work() -> None:
        buffer = await world.start()
        await fill(buffer, 1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(StoreError, match=r"segments in .*No space left on device.*; expected .*free space"):
                await fill(buffer, 1)
        await fill(buffer, 1)
        await buffer.check_conservation()
        assert len(files(tmp_path)) == 2
        assert findings(tmp_path) == set()

    run(work())


def test_bytes_are_on_the_disk_before_the_transaction_commits(world: BufferWorld, monkeypatch: pytest.MonkeyPatch):
    async def work() -> None:
        buffer = await world.start()
        await fill(buffer, 1)
        happened: list[str] = []
        db, fsync = buffer.store.db, os.fsync
        commit = db._commit

        def sync(file: int) -> None:
            happened.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{file}')).suffix}")
            fsync(file)

        monkeypatch.setattr(os, "fsync", sync)
        monkeypatch.setattr(db, "_commit", lambda: (happened.append("commit"), commit()))
        await buffer.put(*[make_group(GroupId("r", "x", "a", 0))] * 2)
        await buffer.put(*[make_group(GroupId("r", "x", "b", 0))] * 2)
        assert happened == ["fsync .seg", "commit", "fsync .seg", "commit"]

    run(work())


def test_what_is_evicted_in_the_transaction_that_kept_it_is_not_written(world: BufferWorld, tmp_path: Path):
    async def work() -> None:
        buffer = await world.start()
        with buffer.store.db.transaction():
            assert buffer.store.blobs.keep(7, 0, b"seven") == b""
            assert buffer.store.blobs.load([(7, 0, b"")]) == [b"seven"]
            buffer.store.blobs.forget(7)
        assert files(tmp_path) == []

    run(work())


# -------------------------------------------------------------------------------------------------- crashes


def put_and_die(folder: Path) -> None:
    async def work() -> None:
        store = Postgres(url=os.environ["URL"]) if "URL" in os.environ else SQLite()
        chosen = SegmentSettings(url=str(folder / "segments"), min_bytes=0)
        buffer = open_buffer(BufferSettings(store=store, segments=chosen), folder)
        await buffer.open_run("r", config_hash="", data_hash="")
        await fill(buffer, 2)

    asyncio.run(work())


@pytest.mark.parametrize("store", ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def test_killed_between_its_segment_and_its_commit_a_put_leaves_bytes_that_nobody_refers_to(tmp_path: Path, store: str):
    url = postgres.server_url() if store == "postgres" else None
    if store == "postgres" and url is None:
        pytest.skip(postgres.MISSING)
    env = {**os.environ, "TRIUNE_FAILPOINT": "buffer.segments.before_commit:2", **({"URL": url} if url else {})}
    process = subprocess.Popen([sys.executable, __file__, str(tmp_path)], env=env)
    assert process.wait(60) == -signal.SIGKILL

    async def work() -> None:
        chosen = SegmentSettings(url=str(tmp_path / "segments"), min_bytes=0)
        settings = BufferSettings(store=Postgres(url=url) if url else SQLite(), segments=chosen)
        buffer = open_buffer(settings, tmp_path)
        await buffer.open_run("r", config_hash="", data_hash="")
        assert (await buffer.check_conservation())["puts"] == 1
        [dead] = files(tmp_path)
        live = (await buffer.stats())["segments/bytes"]
        found = OpenBuffer(buffer.store).verify()
        assert (found.findings, found.num_unreferenced_bytes) == ((), dead.stat().st_size - live)
        assert found.num_unreferenced_bytes > 0
        await fill(buffer, 1)
        assert len(files(tmp_path)) == 2
        assert reclaim(buffer.store).num_bytes == found.num_unreferenced_bytes
        assert reclaim(buffer.store).num_bytes == 0
        assert len(await buffer.lease(2)) == 2
        await buffer.close()

    run(work())


def test_a_put_that_fails_after_its_bytes_were_written_may_be_repeated(world: BufferWorld, tmp_path: Path):
    async def work() -> None:
        buffer = await world.start()
        await fill(buffer, 1)
        try:
            arm_failpoints("buffer.segments.before_commit:1:raise")
            with pytest.raises(Exception, match="failpoint"):
                await fill(buffer, 1)
        finally:
            arm_failpoints("")
        await fill(buffer, 1)
        await buffer.check_conservation()
        assert len(await buffer.lease(2)) == 2
        assert findings(tmp_path) == set()

    run(work())


def test_a_gc_that_dies_after_its_commit_is_finished_by_the_next(world: BufferWorld, tmp_path: Path):
    async def work() -> None:
        await filled_stores.fill(world.open())

    run(work())
    with triune.buffer.open(tmp_path / "buffer.sqlite") as buffer:
        try:
            arm_failpoints("buffer.gc.after_commit:1:raise")
            with pytest.raises(Exception, match="failpoint"):
                delete(buffer.store, equals("source", "policy"), by="", is_dry=False)
        finally:
            arm_failpoints("")
        assert holds(tmp_path, SECRET)
        assert buffer.verify().findings == ()
        reclaim(buffer.store)
        assert not holds(tmp_path, SECRET)
        assert len(buffer.read("r/answers/a/0")) == 1


# --------------------------------------------------------------------------------------------------- damage


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:3])


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda path: flip(path, 40), "the checksum differs in segment"),
        (cut, "ends before its byte"),
        (Path.unlink, "is missing"),
    ],
)
def test_a_damaged_segment_is_found_and_a_lease_goes_on_without_its_entries(tmp_path: Path, harm: Any, says: str):
    async def work() -> None:
        world = BufferWorld(SQLite(), tmp_path, SegmentSettings(min_bytes=0, roll_bytes=1))
        await fill(await world.start(), 2)
        harm(max(files(tmp_path), key=lambda path: path.name))
        found = verify_at(tmp_path / "buffer.sqlite").findings
        entries = {finding.entry for finding in found if finding.check == "blobs"}
        assert entries == {"r/train/t1/0"}
        assert any(says in finding.found for finding in found)
        assert says == "the checksum differs in segment" or any(finding.check == "segments" for finding in found)
        buffer = await world.start()
        with pytest.raises(StoreError, match=f"entry 'r/train/t1/0': it cannot be read .*{says}.*triune buffer verify"):
            await buffer.read("r/train/t1/0")
        await fill(buffer, 1)
        leases = await buffer.lease(2)
        assert [lease.entry for lease in leases] == ["r/train/t0/0", "r/train/t2/0"]
        assert leases.metrics["num_damaged_dropped"] == 1.0
        assert (await states(buffer))["r/train/t1/0"] == "dropped"
        [info] = await buffer.browse(state="dropped")
        assert info.reason == "damaged"
        await buffer.check_conservation()
        world.end()

    run(work())


def test_damaged_rows_are_skipped_by_a_lease_too(tmp_path: Path):
    async def work() -> None:
        world = BufferWorld(SQLite(), tmp_path)
        await fill(await world.start(), 3)
        buffer = await world.start()
        with buffer.store.db.transaction():
            buffer.store.db.execute("UPDATE revisions SET blob = x'00' WHERE entry IN (1, 3)")
        assert [lease.entry for lease in await buffer.lease(1)] == ["r/train/t1/0"]
        assert [info.reason for info in await buffer.browse(state="dropped")] == ["damaged"]
        await buffer.check_conservation()
        world.end()

    run(work())


def test_where_the_whole_place_is_gone_nothing_is_dropped_and_everything_says_so(world: BufferWorld, tmp_path: Path):
    async def work() -> None:
        await fill(await world.start(), 2)
        shutil.move(tmp_path / "segments", tmp_path / "elsewhere")
        match = r"segments in .*: the place is not there: it has no mark; expected .*; mount it"
        with pytest.raises(StoreError, match=match):
            await world.start()
        with triune.buffer.open(tmp_path / "buffer.sqlite") as buffer, pytest.raises(StoreError, match=match):
            buffer.read("r/train/t0/0")
        assert findings(tmp_path) == {("segments", "")}
        late = await world.start(segments=None)
        with pytest.raises(StoreError, match=match):
            await late.lease(1)
        shutil.move(tmp_path / "elsewhere", tmp_path / "segments")
        assert len(await late.lease(2)) == 2

    run(work())


def test_a_damaged_group_that_waits_is_dropped_at_its_deadline_and_deferred_amendments_expire(tmp_path: Path):
    async def work() -> None:
        world = BufferWorld(SQLite(), tmp_path, SegmentSettings(min_bytes=0, roll_bytes=1))
        buffer = await world.start(min_group=1)
        await fill(buffer, 1)
        [lease] = await buffer.lease(1, step=0)
        assert await buffer.amend(lease.entry, {"reward": 1.0}, by="ann", key="k") == "deferred"
        await buffer.put(make_group(GroupId("r", "train", "late", 0), rewards=(None, 1.0)), deadline_s=10)
        for path in files(tmp_path):
            path.unlink()
        await buffer.ack([(lease.entry, lease.use_no)], checkpoint="c", step=1)
        world.time += 20
        assert buffer.who is not None
        with buffer.store.db.transaction():
            buffer.store.entries.settle_due(buffer.who)  # as whoever waits for a slot does
        assert await states(buffer) == {"r/train/t0/0": "spent", "r/train/late/0": "dropped"}
        assert [row["outcome"] for row in await buffer.amendments("r/train/t0/0")] == ["expired"]
        await buffer.check_conservation()
        world.end()

    run(work())


# ------------------------------------------------------------------------------------------ gc and deletion


def test_after_a_deletion_the_bytes_are_in_no_file(world: BufferWorld, tmp_path: Path):
    async def work() -> StoredBuffer:
        buffer = world.open()
        await filled_stores.fill(buffer)
        return buffer

    live = run(work())
    assert holds(tmp_path, SECRET)
    with triune.buffer.open(tmp_path / "buffer.sqlite") as buffer:
        done = delete(buffer.store, equals("data.user_id", "ann"), by="", is_dry=False)
        assert done.num_entries == 2
        assert done.segments.num_bytes > 0
        assert not holds(tmp_path, SECRET)
        assert holds(tmp_path, b"secret of bob")
        assert [str(group.id) for group in buffer.groups("reason != redacted")] == [
            "r/train/t1/0", "r/train/t3/0", "r/answers/a/0",
        ]  # fmt: skip
        assert buffer.verify().findings == ()
        assert reclaim(buffer.store).num_bytes == 0
    run(fill(live, 1))
    assert findings(tmp_path) == set()


def test_a_deletion_reaches_bytes_of_puts_that_never_happened(world: BufferWorld, tmp_path: Path):
    async def work() -> None:
        buffer = await world.start()
        raw = filled_stores.with_user(make_group(GroupId("r", "train", "a", 0)), "ann")
        try:
            arm_failpoints("buffer.segments.before_commit:1:raise")
            with pytest.raises(Exception, match="failpoint"):
                await buffer.put(raw, with_mean_advantages(raw))
        finally:
            arm_failpoints("")
        await buffer.put(raw, with_mean_advantages(raw))
        assert sum(path.read_bytes().count(SECRET) for path in files(tmp_path)) == 2
        delete(buffer.store, equals("data.user_id", "ann"), by="", is_dry=False)
        assert not holds(tmp_path, SECRET)

    run(work())


def test_a_segment_mostly_unreferenced_is_written_anew_while_its_writer_lives(world: BufferWorld, tmp_path: Path):
    async def work() -> None:
        buffer = await world.start()
        await fill(buffer, 5)
        [before] = files(tmp_path)
        with buffer.store.db.transaction():
            for seq in (1, 2, 3, 4):
                buffer.store.blobs.forget(seq)
                buffer.store.db.execute("DELETE FROM revisions WHERE entry = ?", (seq,))
                buffer.store.db.execute("UPDATE entries SET state = 'evicted', reason = 'x' WHERE seq = ?", (seq,))
        size = before.stat().st_size
        with triune.buffer.open(tmp_path / "buffer.sqlite") as other:
            assert reclaim(other.store, is_dry=True).num_compacted == 1
            assert before.exists()
            done = reclaim(other.store)
        assert (done.num_compacted, done.num_removed, done.num_wiped) == (1, 0, 0)
        [after] = files(tmp_path)
        assert after.name != before.name
        assert after.stat().st_size == size - done.num_bytes
        await fill(buffer, 1)
        assert len(files(tmp_path)) == 2
        assert len(await buffer.lease(2)) == 2

    run(work())


# --------------------------------------------------------------------------------------------------- places


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_any_store_of_fsspec_keeps_segments_an_object_per_transaction(tmp_path: Path, kind: str):
    fsspec = pytest.importorskip("fsspec")
    url = f"memory://{tmp_path.name}" if kind == "memory" else f"file://{tmp_path}/objects"

    async def work() -> None:
        world = BufferWorld(SQLite(), tmp_path, SegmentSettings(url=url, min_bytes=0))
        buffer = await world.start()
        await filled_stores.put(buffer, "t0", (1.0, 0.0), 0)
        await filled_stores.put(buffer, "t1", (1.0, 0.0), 0)
        await fill(buffer, 2)
        if kind == "memory":
            fs = fsspec.filesystem("memory")
            names = [path for path in fs.find(f"/{tmp_path.name}") if path.endswith(".seg")]
            assert len(names) == 4
        opened = OpenBuffer(buffer.store)
        assert opened.verify().findings == ()
        with buffer.store.db.transaction():
            place = buffer.store.blobs.place()
        done = delete(buffer.store, equals("data.user_id", "ann"), by="", is_dry=False)
        assert done.segments.num_bytes > 0
        if kind == "memory":
            assert done.segments.num_removed == 1
            gone, *_ = sorted(place.sizes())
            place.delete(gone)
            assert {found.check for found in opened.verify().findings} == {"segments", "blobs"}
            other = await world.start()
            assert len(await other.lease(2)) == 2
            assert [info.reason for info in await other.browse(state="dropped")] == ["damaged"]
        else:
            assert not holds(tmp_path, SECRET)
            assert len(await buffer.lease(3)) == 3
        world.end()

    run(work())


def test_a_range_of_an_object_is_overwritten_by_writing_it_anew(tmp_path: Path):
    pytest.importorskip("fsspec")

    async def work() -> None:
        world = BufferWorld(SQLite(), tmp_path, SegmentSettings(url=f"memory://{tmp_path.name}", min_bytes=0))
        buffer = await world.start()
        raws = [filled_stores.with_user(make_group(GroupId("r", "x", key, 0)), key) for key in ("ann", "bob", "cy")]
        await buffer.stock(raws, buffer="expert")
        done = delete(buffer.store, equals("data.user_id", "bob"), by="", is_dry=False)
        assert (done.segments.num_segments, done.segments.num_wiped) == (1, 1)
        with buffer.store.db.transaction():
            place = buffer.store.blobs.place()
            [(name, size)] = place.sizes().items()
            [content] = place.read([triune.buffer.segments_places.Span(name, 0, size)])
        assert content is not None
        assert (b"secret of ann" in content, b"secret of bob" in content) == (True, False)
        assert len(await buffer.lease(2, buffer="expert", wait=False)) == 2
        world.end()

    run(work())


def test_a_folder_that_moved_is_found_by_its_new_name_and_another_one_is_refused(world: BufferWorld, tmp_path: Path):
    async def work() -> None:
        await fill(await world.start(), 2)
        with pytest.raises(ConfigError, match=r"buffer.segments.url: 'other', without .*; expected 'segments', where"):
            await world.start(segments=SegmentSettings(url="other", min_bytes=0))
        shutil.move(tmp_path / "segments", tmp_path / "other")
        buffer = await world.start(segments=SegmentSettings(url="other", min_bytes=0))
        assert len(await buffer.lease(2)) == 2
        with triune.buffer.open(tmp_path / "buffer.sqlite") as opened:
            assert opened.verify().findings == ()

    run(work())


@pytest.mark.parametrize(
    ("store", "url", "says"),
    [
        (Memory(), "segments", "found segments beside a store in memory"),
        (Postgres(url="postgresql://ann@lab/x"), "segments", "expected a URL or a path from the root"),
        (SQLite(), "sftp://ann:hush@lab/x", "found a password"),
        (SQLite(), "", "at least 1 character"),
    ],
)
def test_segments_that_could_not_be_found_again_are_refused(store: Any, url: str, says: str):
    with pytest.raises(ValueError, match=says):
        BufferSettings.model_validate({"store": store, "segments": {"url": url}})


def test_a_url_of_no_store_says_what_is_missing(tmp_path: Path):
    for url, kind, says in (
        ("carrier-pigeon://roof", ConfigError, "expected a folder, or a URL that fsspec knows"),
        ("adl://x/y", MissingDependency, "needs a package of its own"),
    ):
        with pytest.raises(kind, match=says):
            open_buffer(BufferSettings(segments=SegmentSettings(url=url)), tmp_path)


@pytest.mark.postgres
def test_processes_on_a_server_share_a_folder(tmp_path: Path):
    url = postgres.server_url()
    if url is None:
        pytest.skip(postgres.MISSING)

    async def work() -> None:
        chosen = SegmentSettings(url=str(tmp_path / "shared"), min_bytes=0)
        settings = BufferSettings(store=Postgres(url=url), segments=chosen)
        first, second = open_buffer(settings, tmp_path), open_buffer(settings, tmp_path)
        await first.open_run("r", config_hash="", data_hash="")
        await second.join_run("r", timeout_s=5)
        for buffer in (first, second, first, second):
            group = await buffer.admit(Task(key="t"), ROOMY)
            assert group is not None
            await buffer.put(make_group(group), make_group(group))
        assert len(files(tmp_path)) == 2
        assert len(await second.lease(4)) == 4
        delete(first.store, equals("state", "dropped"), by="", is_dry=False)
        assert OpenBuffer(second.store).verify().findings == ()
        assert (await second.stats())["segments/num_blobs"] == 8
        await second.close()
        await first.close()

    run(work())


if __name__ == "__main__":
    put_and_die(Path(sys.argv[1]))
