"""The PostgreSQL store on a server: wake-ups, broken connections, a server that crashes, and what it says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import triune.buffer
from triune.buffer import StoredBuffer, front, open_buffer
from triune.buffer.config import BufferSettings
from triune.buffer.database import Interrupted, OutcomeUnknown
from triune.buffer.stores.postgres import Postgres
from triune.errors import ConfigError, StoreError
from triune.ports import AdmissionRule
from triune.records import GroupId, Task
from triune.testing import postgres
from triune.testing.buffers import ROOMY, run
from triune.testing.groups import make_group

psycopg = pytest.importorskip("psycopg")
pytestmark = pytest.mark.postgres

ID = GroupId("r", "train", "a", 0)


@pytest.fixture
def url() -> str:
    found = postgres.server_url()
    if found is None:
        pytest.skip(postgres.MISSING)
    return found


@pytest.fixture
def own_server() -> Iterator[postgres.PostgresServer]:
    """A server that a test may crash."""
    binaries = postgres.find_binaries()
    if binaries is None:
        pytest.skip(postgres.MISSING)
    server = postgres.PostgresServer(binaries)
    server.start()
    yield server
    server.remove()


def open_at(url: str, folder: Path, **options: Any) -> StoredBuffer:
    return open_buffer(BufferSettings(store=Postgres(url=url, **options)), folder)


async def started(url: str, folder: Path, **options: Any) -> StoredBuffer:
    buffer = open_at(url, folder, **options)
    await buffer.open_run("r", config_hash="", data_hash="")
    return buffer


async def put(buffer: StoredBuffer, key: str) -> str:
    group = GroupId("r", "train", key, 0)
    return await buffer.put(make_group(group), make_group(group))


def ask(url: str, sql: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url, autocommit=True) as line:
        cursor = line.execute(sql)
        return cursor.fetchall() if cursor.description else []


# ---------------------------------------------------------------------------------------------- wake-ups


def test_processes_that_wait_are_woken_by_the_server_and_ask_nothing_meanwhile(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(front, "RECHECK_S", 60.0)

    async def work() -> None:
        trainer = await started(url, tmp_path)
        explorer = open_at(url, tmp_path)
        await explorer.join_run("r", timeout_s=5)
        waiting = asyncio.ensure_future(trainer.lease(1))
        await asyncio.sleep(0.2)
        statements = []
        db: Any = trainer.store.db
        monkeypatch.setattr(db, "_script", lambda script, real=db._script: statements.append(script) or real(script))
        await asyncio.sleep(0.3)
        assert statements == []
        await put(explorer, "a")
        assert [lease.entry for lease in await asyncio.wait_for(waiting, 5)] == ["r/train/a/0"]
        await explorer.close()
        await trainer.close()

    run(work())


def test_a_listener_whose_connection_broke_comes_back_and_wakes_everybody(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(front, "RECHECK_S", 60.0)

    async def work() -> None:
        trainer, explorer = await started(url, tmp_path, schema="listen"), open_at(url, tmp_path, schema="listen")
        await explorer.join_run("r", timeout_s=5)
        waiting = asyncio.ensure_future(trainer.lease(1))
        await asyncio.sleep(0.2)
        channel = trainer.store.db._channel  # type: ignore[attr-defined]
        gone = ask(url, f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query = 'LISTEN \"{channel}\"'")
        assert len(gone) == 2
        await put(explorer, "a")
        assert len(await asyncio.wait_for(waiting, 10)) == 1
        await explorer.close()
        await trainer.close()

    run(work())


# ---------------------------------------------------------------------------------- broken connections


def test_a_connection_that_broke_between_calls_is_made_again_unnoticed(url: str, tmp_path: Path):
    async def work() -> None:
        buffer = await started(url, tmp_path)
        ask(url, f"SELECT pg_terminate_backend({_pid(buffer)})")
        assert await put(buffer, "a") == "r/train/a/0"
        await buffer.check_conservation()
        await buffer.close()

    run(work())


def _pid(buffer: StoredBuffer) -> int:
    return buffer.store.db._line.info.backend_pid  # type: ignore[attr-defined]


def test_a_connection_that_breaks_inside_a_transaction_repeats_it_whole(url: str, tmp_path: Path):
    async def work() -> None:
        buffer = await started(url, tmp_path)
        pids: list[int] = []

        def interfere() -> None:
            pids.append(_pid(buffer))
            buffer.store.db.execute("UPDATE runs SET admitted = admitted + 1")
            if len(pids) < 3:
                ask(url, f"SELECT pg_terminate_backend({pids[-1]})")
                time.sleep(0.1)
            buffer.store.db.execute("UPDATE runs SET refunded = refunded + 1")

        await buffer._writer.submit(interfere)
        assert len(set(pids)) == 3
        stats = await buffer.stats()
        assert (stats["admitted"], stats["refunded"]) == (1, 1)
        await buffer.close()

    run(work())


@pytest.mark.parametrize("arrives", [True, False])
def test_a_connection_that_breaks_during_the_commit_leaves_exactly_one_put(
    arrives: bool, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def work() -> None:
        buffer = await started(url, tmp_path)
        db: Any = buffer.store.db
        real, breaks, times = db._script, [True], []

        def script(text: str) -> Any:
            if "INSERT INTO writers" not in text:
                return real(text)
            times.append(text)
            if not breaks:
                return real(text)
            breaks.clear()
            if arrives:
                real(text)
            db._line.close()
            raise psycopg.OperationalError("server closed the connection unexpectedly")

        monkeypatch.setattr(db, "_script", script)
        assert await put(buffer, "a") == "r/train/a/0"
        assert len(times) == (1 if arrives else 2)
        stats = await buffer.stats()
        assert (stats["puts"], stats["late"]) == (1, 0)
        await buffer.check_conservation()
        await buffer.close()

    run(work())


def test_calls_whose_commit_nobody_answers_for_are_told_so_and_not_repeated(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def work() -> None:
        buffer = await started(url, tmp_path)
        await put(buffer, "a")
        db: Any = buffer.store.db
        real = db._script

        def script(text: str) -> Any:
            found = real(text)
            if "INSERT INTO writers" in text:
                db._line.close()
                raise psycopg.OperationalError("server closed the connection unexpectedly")
            return found

        def refuse() -> Any:
            raise StoreError(db.where, "the password is wrong", "another one")

        with monkeypatch.context() as broken:
            broken.setattr(db, "_script", script)
            broken.setattr(db, "_connect", refuse)
            calls = (buffer.lease(1, wait=False), buffer.admit(Task(key="new"), ROOMY))
            answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(answer) for answer in answers] == [OutcomeUnknown, OutcomeUnknown]
        stats = await buffer.stats()
        assert (stats["uses/leased"], stats["admitted"]) == (1, 1)
        await buffer.close()

    run(work())


def test_who_holds_the_store_without_a_word_is_stopped_and_others_go_on(url: str, tmp_path: Path):
    """As a suspended machine would: its transaction is undone, and it may repeat it when it wakes."""

    async def work() -> None:
        frozen = await started(url, tmp_path, busy_timeout_s=2.0)
        other = open_at(url, tmp_path)
        await other.join_run("r", timeout_s=5)
        asleep: list[float] = []

        def freeze() -> None:
            frozen.store.db.execute("UPDATE runs SET admitted = admitted + 1")
            if not asleep:
                asleep.append(3.0)
                time.sleep(3.0)
            frozen.store.db.execute("UPDATE runs SET refunded = refunded + 1")

        late = frozen._writer.submit(freeze)
        await asyncio.sleep(0.1)
        await asyncio.wait_for(put(other, "a"), 2.5)
        await late
        stats = await other.stats()
        assert (stats["admitted"], stats["refunded"], stats["puts"]) == (1, 1, 1)
        await other.close()
        await frozen.close()

    run(work())


def test_a_store_locked_for_too_long_says_so_and_the_call_can_be_repeated(url: str, tmp_path: Path):
    async def work() -> None:
        buffer = await started(url, tmp_path, busy_timeout_s=1.0)
        key = buffer.store.db._key  # type: ignore[attr-defined]
        with psycopg.connect(url) as other:
            other.execute(f"SELECT pg_advisory_xact_lock({key})")
            with pytest.raises(StoreError, match=r"locked for too long .*pg_stat_activity, or raise .*busy_timeout_s"):
                await put(buffer, "a")
        assert await put(buffer, "a") == "r/train/a/0"
        await buffer.close()

    run(work())


# ------------------------------------------------------------------------------------ crashes of the server


def test_a_server_that_crashes_in_the_middle_of_puts_loses_nothing_it_acknowledged(
    own_server: postgres.PostgresServer, tmp_path: Path
):
    acknowledged: list[str] = []

    async def explore(buffer: StoredBuffer, name: str, goes_on: Callable[[], bool]) -> None:
        rule, number = AdmissionRule(max_staleness=0, fresh=1e6), 0
        while goes_on():
            group = await buffer.admit(Task(key=str(number), taskset=name), rule)
            assert group is not None
            acknowledged.append(await buffer.put(make_group(group), make_group(group)))
            number += 1

    async def work() -> None:
        first = await started(own_server.url, tmp_path)
        second = open_at(own_server.url, tmp_path)
        await second.join_run("r", timeout_s=5)
        crashes = 0
        explorers = [
            asyncio.ensure_future(explore(buffer, name, lambda: crashes < 3))
            for buffer, name in ((first, "one"), (second, "two"))
        ]
        for _ in range(3):
            before = len(acknowledged)
            while len(acknowledged) < before + 30:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(own_server.stop, "immediate")
            await asyncio.to_thread(own_server.start)
            crashes += 1
        await asyncio.gather(*explorers)
        numbers = await first.check_conservation()
        stored = {info.entry for info in await first.browse(limit=10**6)}
        assert len(acknowledged) == len(set(acknowledged)) == numbers["puts"] == numbers["entries/ready"]
        assert stored == set(acknowledged)
        stats = await first.stats()
        assert (stats["open"], stats["late"], stats["admitted"]) == (0, 0, len(stored))
        await second.close()
        await first.close()

    asyncio.run(asyncio.wait_for(work(), 100))


def test_a_server_that_stays_away_is_told_after_a_while_and_what_was_committed_is_there_later(
    own_server: postgres.PostgresServer, tmp_path: Path
):
    async def work() -> None:
        buffer = await started(own_server.url, tmp_path, reconnect_s=0.3)
        await put(buffer, "a")
        own_server.stop("immediate")
        with pytest.raises(Interrupted, match=r"the server does not answer .*start the server"):
            await put(buffer, "b")
        with pytest.raises(StoreError, match=r"the server does not answer .*start the server, or correct"):
            open_at(own_server.url, tmp_path)
        own_server.start()
        await put(buffer, "b")
        assert (await buffer.stats())["puts"] == 2
        await buffer.close()

    run(work())


def test_a_server_that_stays_away_is_waited_for_once_with_a_word_and_then_a_process_ends_at_once(
    own_server: postgres.PostgresServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    async def work() -> None:
        buffer = await started(own_server.url, tmp_path, reconnect_s=2.0)
        own_server.kill()
        with pytest.raises(Interrupted):
            await put(buffer, "a")
        [said] = caplog.messages
        assert "the server does not answer" in said
        assert "asking again for up to 2 s" in said
        began = time.monotonic()
        with pytest.raises(Interrupted):
            await put(buffer, "a")
        await buffer.close()
        assert time.monotonic() - began < 1.0

    run(work())


def test_a_server_that_still_recovers_is_waited_for_by_who_opens_it_and_one_that_is_not_there_is_not(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real, said = psycopg.connect, ["FATAL:  the database system is in recovery mode", "FATAL:  ... is starting up"]

    def connect(*args: Any, **options: Any) -> Any:
        if said:
            raise psycopg.OperationalError(said.pop())
        return real(*args, **options)

    monkeypatch.setattr(psycopg, "connect", connect)
    assert run(_epoch(url, tmp_path)) == 0
    assert said == []
    said += ["connection refused: is the server running?"]
    with pytest.raises(StoreError, match="the server does not answer"):
        open_at(url, tmp_path)


async def _epoch(url: str, folder: Path) -> int:
    buffer = await started(url, folder)
    await buffer.close()
    return buffer.epoch


# ----------------------------------------------------------------------------------------- what it says


def test_two_schemas_of_one_database_are_two_buffers(url: str, tmp_path: Path):
    async def work() -> None:
        mine = tmp_path.as_posix()[-40:]
        one, two = [await started(url, tmp_path, schema=f"{mine}'{name}\"") for name in ("one", "two")]
        await put(one, "a")
        assert ((await one.stats())["puts"], (await two.stats())["puts"]) == (1, 0)
        assert one.epoch == two.epoch == 0
        await one.close()
        again = await started(url, tmp_path, schema=f"{mine}'one\"")
        assert again.epoch == 1
        assert (await again.stats())["puts"] == 1
        await again.close()
        await two.close()

    run(work())


def test_a_url_with_a_schema_opens_what_a_run_made(url: str, tmp_path: Path):
    async def work() -> str:
        buffer = await started(url, tmp_path)
        await put(buffer, "a")
        await buffer.close()
        return buffer.store.db.schema  # type: ignore[attr-defined]

    with triune.buffer.open(f"{url}&schema={run(work())}") as looked:
        assert [row.entry for row in looked.query("state = ready")] == ["r/train/a/0"]
        assert looked.verify().findings == ()
    with pytest.raises(StoreError, match="no such schema"):
        triune.buffer.open(f"{url}&schema=typo")
    assert ask(url, "SELECT 1 FROM pg_namespace WHERE nspname = 'typo'") == []
    with triune.buffer.open(f"{url}&schema=typo", makes=True) as made:
        assert list(made) == []
    with pytest.raises(ConfigError, match="schema"):
        triune.buffer.open(url)


def test_a_schema_of_another_program_or_a_newer_triune_is_refused(url: str, tmp_path: Path):
    for name in ("photos", "newer"):
        ask(url, f"DROP SCHEMA IF EXISTS {name} CASCADE")
    ask(url, "CREATE SCHEMA photos")
    ask(url, "CREATE TABLE photos.albums (id int)")
    with pytest.raises(StoreError, match=r"schema 'photos': a database of another program"):
        open_at(url, tmp_path, schema="photos")
    run(_open_and_close(url, tmp_path))
    ask(url, "UPDATE newer.schema_version SET version = 99")
    with pytest.raises(StoreError, match="buffer schema 99"):
        open_at(url, tmp_path, schema="newer")


async def _open_and_close(url: str, folder: Path) -> None:
    await open_at(url, folder, schema="newer").close()


def test_who_may_not_enter_is_told_why_without_a_password_in_the_message(
    own_server: postgres.PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    url, rules = own_server.url, own_server.folder / "data" / "pg_hba.conf"
    ask(url, "CREATE ROLE ann LOGIN PASSWORD 'right'")
    rules.write_text("local all ann scram-sha-256\n" + rules.read_text())
    ask(url, "SELECT pg_reload_conf()")
    ann = url.replace("triune@", "ann@")
    monkeypatch.setenv("PGPASSWORD", "wrong")
    with pytest.raises(StoreError, match="the password is wrong") as caught:
        open_at(ann, tmp_path)
    assert not isinstance(caught.value, Interrupted)
    monkeypatch.setenv("PGPASSWORD", "right")
    with pytest.raises(StoreError, match=r"not allowed .*ask for CREATE on the database") as caught:
        open_at(ann, tmp_path)
    assert "right" not in str(caught.value)
    with pytest.raises(StoreError, match=r"no such database .*createdb"):
        open_at(url.replace("/postgres", "/nowhere"), tmp_path)
    with pytest.raises(StoreError, match=r"no such user .*createuser"):
        open_at(url.replace("triune@", "bob@"), tmp_path)
    with pytest.raises(StoreError, match=r"buffer.store.url: not understood"):
        open_at("postgresql://x?colour=red", tmp_path)


def test_names_with_zero_characters_are_refused_in_words(url: str, tmp_path: Path):
    async def work() -> None:
        buffer = await started(url, tmp_path)
        with pytest.raises(StoreError, match="text that PostgreSQL cannot store"):
            await buffer.admit(Task(key="a\0b"), ROOMY)
        assert await buffer.admit(Task(key="b"), ROOMY) is not None
        await buffer.close()

    run(work())


def test_the_clock_is_the_server_s_unless_another_is_given(url: str, tmp_path: Path):
    async def work() -> None:
        buffer = await started(url, tmp_path)
        ((server_s,),) = ask(url, "SELECT extract(epoch FROM clock_timestamp())::float8")
        await put(buffer, "a")
        [info] = await buffer.browse()
        assert abs(info.created_s - server_s) < 5
        await buffer.close()
        db = Postgres(url=url)(tmp_path, lambda: 17.0)
        with db.transaction():
            assert db.now == 17.0
        db.close()

    run(work())


def test_a_closed_buffer_leaves_no_connection_behind(url: str, tmp_path: Path):
    async def work() -> list[int]:
        buffer = await started(url, tmp_path)
        pids = [_pid(buffer), buffer.store.db._news.pid]  # type: ignore[attr-defined]
        await buffer.close()
        return pids

    pids = asyncio.run(work())
    deadline = time.monotonic() + 5
    while ask(url, f"SELECT 1 FROM pg_stat_activity WHERE pid IN ({pids[0]}, {pids[1]})"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
