"""Under load: urgent entries among a hundred thousand, and many processes on one file.

`TRIUNE_STRESS_S` is how long the slow stress test writes (5 s), `TRIUNE_URGENT` how often the slow one asks for an
urgent entry (1000).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest

from triune.buffer import BufferSettings, open_buffer
from triune.buffer.stores.memory import Memory
from triune.records import GroupId, Source, encode_group
from triune.testing import postgres
from triune.testing.bulk import insert_entries
from triune.testing.groups import make_group

SHARED = ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]


def settings_of(store: str) -> BufferSettings:
    """A store that several processes share; skips where there is no server."""
    if store == "sqlite":
        return BufferSettings()
    url = postgres.server_url()
    if url is None:
        pytest.skip(postgres.MISSING)
    return BufferSettings.model_validate({"store": {"use": "postgres", "url": url}})


# ------------------------------------------------------------------------------------------------------ urgent


async def find_urgent(settings: BufferSettings, folder: Path, num_waiting: int, times: int) -> int:
    """How often a person's entry was in the batch after it was put, while somebody else puts at full speed."""
    buffer = open_buffer(settings, folder)
    await buffer.open_run("r", config_hash="", data_hash="")
    with buffer.store.db.transaction():
        insert_entries(buffer.store.db, "r", 0, num_waiting)
    num_put, found = 0, 0

    async def put_at_full_speed() -> None:
        nonlocal num_put
        while True:
            groups = [make_group(GroupId("r", "flood", str(num_put + n), 0), priority=9.0) for n in range(16)]
            await asyncio.gather(*(buffer.put(group, group) for group in groups))
            num_put += len(groups)

    writer = asyncio.create_task(put_at_full_speed())
    for number in range(times):
        human = make_group(GroupId("r", "people", str(number), 0), source=Source.HUMAN)
        await buffer.put(human, human)
        leases = await buffer.lease(8)
        found += str(human.id) in {lease.entry for lease in leases}
        await buffer.ack([(lease.entry, lease.use_no) for lease in leases], checkpoint="c", step=number + 1)
    assert not writer.done()
    writer.cancel()
    await asyncio.gather(writer, return_exceptions=True)
    assert num_put > times, "the writer was at full speed"
    await buffer.check_conservation()
    await buffer.close()
    return found


@pytest.mark.parametrize("priority", [None, "linear_decay"])
def test_an_urgent_entry_is_in_the_next_batch_while_others_are_put_at_full_speed(tmp_path: Path, priority: Any):
    settings = BufferSettings.model_validate({"store": Memory(), "priority": priority})
    assert asyncio.run(find_urgent(settings, tmp_path, 2000, 30)) == 30


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("store", SHARED)
def test_an_urgent_entry_is_in_the_next_batch_among_a_hundred_thousand_that_wait(tmp_path: Path, store: str):
    times = int(os.environ.get("TRIUNE_URGENT", "1000"))
    assert asyncio.run(find_urgent(settings_of(store), tmp_path, 100_000, times)) == times


def test_a_batch_of_one_takes_an_urgent_entry_too(tmp_path: Path):
    async def work() -> list[str]:
        buffer = open_buffer(BufferSettings(store=Memory()), tmp_path)
        await buffer.open_run("r", config_hash="", data_hash="")
        for taskset, source in (("plain", Source.POLICY), ("people", Source.HUMAN)):
            group = make_group(GroupId("r", taskset, "a", 0), source=source)
            await buffer.put(group, group)
        entries = [lease.group.id.taskset for lease in await buffer.lease(1)]
        await buffer.close()
        return entries

    assert asyncio.run(work()) == ["people", "plain"]


# ------------------------------------------------------------------------------------------------------ stress


def write_for(settings: BufferSettings, folder: str, writer: int, seconds: float, told: Any) -> None:
    """Put groups until the time is over, and say what was put: entry → checksum of its bytes."""

    async def work() -> dict[str, str]:
        buffer = open_buffer(settings, Path(folder))
        await buffer.join_run("r", timeout_s=60)
        put: dict[str, str] = {}
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            groups = [
                make_group(GroupId("r", f"w{writer}", str(len(put) + n), 0), rewards=(writer, n), answer=20)
                for n in range(4)
            ]
            await asyncio.gather(*(buffer.put(group, group) for group in groups))
            put |= {str(group.id): checksum(group) for group in groups}
        await buffer.close()
        return put

    told.put(("put", outcome_of(work)))


def read_until_told(settings: BufferSettings, folder: str, told: Any, is_over: Any) -> None:
    """Lease and acknowledge until everything is taken, and say what was seen."""

    async def work() -> dict[str, str]:
        buffer = open_buffer(settings, Path(folder))
        await buffer.join_run("r", timeout_s=60)
        seen: dict[str, str] = {}
        step = 0
        while True:
            was_over = is_over.is_set()
            leases = await buffer.lease(16, wait=False)
            for lease in leases:
                assert lease.entry not in seen, f"{lease.entry} was leased twice"
                seen[lease.entry] = checksum(lease.group)
            step += 1
            await buffer.ack([(lease.entry, lease.use_no) for lease in leases], checkpoint="c", step=step)
            if not leases and was_over:
                break
            if not leases:
                await asyncio.sleep(0.01)
        await buffer.close()
        return seen

    told.put(("seen", outcome_of(work)))


def outcome_of(work: Any) -> Any:
    """What it returns; the words of its error, when it fails."""
    try:
        return asyncio.run(work())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def checksum(group: Any) -> str:
    return hashlib.blake2b(encode_group(group), digest_size=8).hexdigest()


async def stress(settings: BufferSettings, folder: Path, writers: int, readers: int, seconds: float) -> dict[str, int]:
    """Let processes write and read one store; how much was put and seen."""
    context = multiprocessing.get_context("spawn")
    told, is_over = context.Queue(), context.Event()
    buffer = open_buffer(settings, folder)
    await buffer.open_run("r", config_hash="", data_hash="")
    shared = (settings, str(folder))
    writing = [context.Process(target=write_for, args=(*shared, n, seconds, told)) for n in range(writers)]
    reading = [context.Process(target=read_until_told, args=(*shared, told, is_over)) for _ in range(readers)]
    for process in (*writing, *reading):
        process.start()
    reports = [await asyncio.to_thread(told.get, timeout=seconds + 240) for _ in writing]
    is_over.set()
    reports += [await asyncio.to_thread(told.get, timeout=240) for _ in reading]
    for process in (*writing, *reading):
        await asyncio.to_thread(process.join, 30)
    errors = [found for _, found in reports if isinstance(found, str)]
    assert errors == []
    put: dict[str, str] = {}
    seen: dict[str, str] = {}
    for kind, found in reports:
        into = put if kind == "put" else seen
        assert into.keys().isdisjoint(found), "no two processes hold one entry"
        into |= found
    assert seen == put, "checksums agree, nothing is lost"
    numbers = await buffer.check_conservation()
    assert numbers["puts"] == len(put)
    await buffer.close()
    return {"put": len(put), "seen": len(seen)}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("store", SHARED)
def test_sixteen_writers_and_four_readers_lose_nothing_and_meet_no_lock(tmp_path: Path, store: str):
    seconds = float(os.environ.get("TRIUNE_STRESS_S", "5"))
    found = asyncio.run(stress(settings_of(store), tmp_path, 16, 4, seconds))
    print(json.dumps({**found, "seconds": seconds}))
    assert found["put"] > 16
