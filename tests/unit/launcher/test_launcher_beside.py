"""Processes that share a store: an explorer notices that its run began again, and nobody takes a name that is taken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from triune.buffer import BufferSettings, StoredBuffer, open_buffer
from triune.buffer.stores.postgres import MARK, Postgres
from triune.buffer.stores.sqlite import SQLite
from triune.config import load_config
from triune.errors import ConfigError, FencedError
from triune.launcher import beside
from triune.launcher.alone import watch_explorers
from triune.launcher.beside import watch_trainer
from triune.launcher.folder import Start
from triune.launcher.local import _open_folder
from triune.launcher.request import Request
from triune.testing import postgres
from triune.testing.buffers import put_group
from triune.testing.training import RecordingMonitor

STORES = [pytest.param("sqlite"), pytest.param("postgres", marks=pytest.mark.postgres)]


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> Any:
    if request.param == "sqlite":
        return SQLite()
    if postgres.server_url() is None:
        pytest.skip(postgres.MISSING)
    return Postgres(url=postgres.server_url() or "")


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "LOOK_S", 0.02)
    monkeypatch.setattr("triune.launcher.alone.LOOK_S", 0.02)


class Opened:
    """Opens buffers, and closes them all."""

    def __init__(self) -> None:
        self.buffers: list[StoredBuffer] = []

    def __call__(self, store: Any, folder: Path, lease_s: float = 60) -> StoredBuffer:
        folder.mkdir(exist_ok=True)
        self.buffers.append(open_buffer(BufferSettings(store=store, lease_s=lease_s), folder))
        return self.buffers[-1]


@pytest.fixture
def opened() -> Iterator[Opened]:
    found = Opened()
    yield found
    for buffer in found.buffers:
        asyncio.run(buffer.close())


@pytest.mark.parametrize("is_alive", [True, False])
def test_an_explorer_notices_that_its_run_was_begun_again_in_another_store(
    store: Any, opened: Opened, tmp_path: Path, is_alive: bool
):
    async def work() -> None:
        folder = tmp_path / "run"
        trainer, explorer = opened(store, folder), opened(store, folder)
        await trainer.open_run("r", config_hash="", data_hash="")
        await explorer.join_run("r", timeout_s=5)
        watch = asyncio.ensure_future(watch_trainer(explorer, RecordingMonitor(), folder))
        await asyncio.sleep(0.2)
        assert not watch.done(), "all is as it was"
        if not is_alive:
            await trainer.close()
        folder.rename(tmp_path / "run.1")
        await asyncio.sleep(0.1)
        await opened(store, folder).open_run("r", config_hash="", data_hash="")
        with pytest.raises(FencedError, match="another incarnation of the run has begun"):
            await asyncio.wait_for(watch, 5)

    asyncio.run(work())


@pytest.mark.postgres
def test_a_named_schema_stays_where_it_is_whatever_a_folder_says(opened: Opened, tmp_path: Path):
    url = postgres.server_url()
    if url is None:
        pytest.skip(postgres.MISSING)

    async def work() -> None:
        trainer = opened(Postgres(url=url, schema="named_beside"), tmp_path)
        await trainer.open_run("r", config_hash="", data_hash="")
        (tmp_path / MARK).write_text("other")
        watch = asyncio.ensure_future(watch_trainer(trainer, RecordingMonitor(), tmp_path))
        await asyncio.sleep(0.2)
        assert not watch.done()
        watch.cancel()

    asyncio.run(work())


# --------------------------------------------------------------------------------------------------- taken names


def request_of(store: Any, tmp_path: Path, name: str, start: Start) -> Request:
    config = load_config({"name": name, "runs_dir": str(tmp_path / "runs"), "tasks": {"use": "arithmetic"}})
    config = config.model_copy(update={"buffer": config.buffer.model_copy(update={"store": store})})
    return Request(config=config, roles=("explorer", "trainer"), start=start)


@pytest.fixture
def shared(store: Any, tmp_path: Path) -> Any:
    """The same store, beside the run's folder."""
    is_file = isinstance(store, SQLite)
    return SQLite(path=str(tmp_path / "s.sqlite")) if is_file else Postgres(url=store.url, schema=f"s_{tmp_path.name}")


def test_a_name_that_a_shared_store_holds_is_not_begun_again_and_nothing_is_moved(
    shared: Any, opened: Opened, tmp_path: Path
):
    async def explore(name: str) -> None:
        buffer = opened(shared, tmp_path)
        await buffer.open_run(name, config_hash="", data_hash="")
        await put_group(buffer, "a")

    asyncio.run(explore("taken"))
    folder = tmp_path / "runs" / "taken"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "run.resolved.json").write_text("{}")
    for start in (Start.RESTART, Start.NEW):
        with pytest.raises(ConfigError, match=r"a run 'taken' is in .* already: 1 groups admitted, .*set name=…"):
            _open_folder(request_of(shared, tmp_path, "taken", start))
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["taken"]
    _open_folder(request_of(shared, tmp_path, "free", Start.NEW)).release()


def test_a_run_that_left_nothing_in_a_shared_store_may_be_tried_again(shared: Any, opened: Opened, tmp_path: Path):
    async def fail(name: str) -> None:
        await opened(shared, tmp_path).open_run(name, config_hash="", data_hash="")

    asyncio.run(fail("early"))
    _open_folder(request_of(shared, tmp_path, "early", Start.NEW)).release()


def test_a_store_in_the_run_s_own_folder_goes_with_it(opened: Opened, tmp_path: Path):
    async def explore() -> None:
        buffer = opened(SQLite(), tmp_path / "runs" / "own")
        await buffer.open_run("own", config_hash="", data_hash="")
        await put_group(buffer, "a")

    (tmp_path / "runs").mkdir()
    asyncio.run(explore())
    (tmp_path / "runs" / "own" / "run.resolved.json").write_text("{}")
    _open_folder(request_of(SQLite(), tmp_path, "own", Start.RESTART)).release()
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["own", "own.1"]


# ------------------------------------------------------------------------------------------- nobody explores


class Notes(RecordingMonitor):
    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


async def soon(what: Callable[[], bool]) -> None:
    while not what():
        await asyncio.sleep(0.01)


def test_a_trainer_that_waits_in_vain_says_so_and_ends_with_what_is_imported_later(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("triune.launcher.alone.EXPLORER_S", 0.05)

    async def work() -> None:
        buffer, monitor = opened(SQLite(), tmp_path), Notes()
        await buffer.open_run("r", config_hash="", data_hash="")
        watch = asyncio.ensure_future(watch_explorers(buffer, "r", monitor))
        lease = asyncio.ensure_future(buffer.lease(4))
        await asyncio.wait_for(soon(lambda: bool(monitor.notes)), 5)
        assert "start `triune explore` with the same file" in monitor.notes[0]
        await asyncio.sleep(0.1)
        assert not lease.done()
        await in_main(buffer)
        assert len(await asyncio.wait_for(lease, 5)) == 1, "the last batch is a short one"
        await asyncio.wait_for(watch, 5)
        assert [note.partition(":")[2] for note in monitor.notes[1:]] == [
            " trains on what the buffer holds, and ends with it"
        ]

    asyncio.run(work())


async def in_main(buffer: StoredBuffer) -> None:
    """As an import into `main` leaves it."""
    from triune.buffer.parcels import make_parcel
    from triune.ports import EntryState
    from triune.records import GroupId
    from triune.testing.groups import make_group

    group = make_group(GroupId("other", "train", "a", 0))
    store = buffer.store
    await buffer._writer.submit(
        lambda: store.entries.insert_free(make_parcel(group, group), buffer="main", scope="", state=EntryState.READY)
    )


@pytest.mark.parametrize("who", ["an explorer that joins", "an earlier incarnation that explored"])
def test_a_trainer_whose_run_is_or_was_explored_waits_for_its_explorer(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
):
    monkeypatch.setattr("triune.launcher.alone.EXPLORER_S", 0.05)

    async def work() -> None:
        buffer, monitor = opened(SQLite(), tmp_path), Notes()
        await buffer.open_run("r", config_hash="", data_hash="")
        if who.startswith("an explorer"):
            explorer = opened(SQLite(), tmp_path)
            await explorer.join_run("r", timeout_s=5)
            await explorer.close()
        else:
            await put_group(buffer, "a")
            await buffer.close()
            buffer = opened(SQLite(), tmp_path)
            await buffer.open_run("r", config_hash="", data_hash="")
        await in_main(buffer)
        await asyncio.wait_for(watch_explorers(buffer, "r", monitor), 5)
        assert monitor.notes == []
        lease = asyncio.ensure_future(buffer.lease(4))
        await asyncio.sleep(0.1)
        assert not lease.done()
        await buffer.finish("done")
        await lease

    asyncio.run(work())
