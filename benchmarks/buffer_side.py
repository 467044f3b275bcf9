"""One process of `bench_buffer`: puts records or leases them, through Triune's buffer or bare through the driver.

    python -m benchmarks.buffer_side '<case as JSON>'

It prepares what it writes, says `ready`, waits for a line on its standard input, works, and prints one JSON object.
The bare side does what any queue has to: a row per record, inserted in transactions of a batch; then batches are
selected, marked as taken and read.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from triune.buffer import BufferSettings, open_buffer
from triune.records import Experience, ExperienceId, Group, GroupId, RolloutId, Task, Turn, encode_group

RUN = "bench"


def make_records(writer: int, num: int, group_size: int, tokens: int) -> list[Group]:
    """Groups of answers that differ in every token, with advantages."""
    rng = np.random.default_rng(writer)
    return [_make_group(GroupId(RUN, f"w{writer}", f"{n:07d}", 0), group_size, tokens, rng) for n in range(num)]


def _make_group(group: GroupId, size: int, length: int, rng: np.random.Generator) -> Group:
    prompt = max(1, length // 8)
    mask = np.arange(length) >= prompt
    records = tuple(
        Experience(
            id=ExperienceId(RolloutId(group, member, 0)),
            tokens=rng.integers(0, 150_000, length, dtype=np.int32),
            action_mask=mask,
            logprobs=np.where(mask, -rng.random(length, dtype=np.float32), np.float32(np.nan)),
            versions=np.where(mask, 0, -1).astype(np.int32),
            turns=(Turn(start=prompt, stop=length),),
            reward=float(member % 2),
            reward_parts={"exact": float(member % 2)},
            streams={"advantages": np.where(mask, np.float32(0.5 - member % 2), np.float32(0)).astype(np.float32)},
        )
        for member in range(size)
    )
    return Group(
        id=group, task=Task(key=group.task_key, taskset=group.taskset, data={"question": "?"}), records=records
    )


def tokens_of(size_bytes: int) -> int:
    """How many tokens make a record of about this size."""
    low, high = 8, max(16, size_bytes)
    rng = np.random.default_rng(0)
    while low < high - 1:
        middle = (low + high) // 2
        one = _make_group(GroupId(RUN, "w0", "0000000", 0), 1, middle, rng)
        low, high = (middle, high) if len(encode_group(one)) <= size_bytes else (low, middle)
    return low


def batches(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """Parts of this size, in order."""
    return [items[start : start + size] for start in range(0, len(items), size)]


# ------------------------------------------------------------------------------------------------------ Triune


def settings_of(case: dict[str, Any]) -> BufferSettings:
    """The store that a case names, and its priority."""
    return BufferSettings.model_validate(
        {"store": case["store"], "priority": case.get("priority"), "poll_s": 0.002, "lease_s": 600}
    )


async def _ours_write(case: dict[str, Any], go: Callable[[], None]) -> dict[str, Any]:
    groups = make_records(case["writer"], case["num"] // case["group"], case["group"], case["tokens"])
    buffer = open_buffer(settings_of(case), Path(case["folder"]))
    await buffer.join_run(RUN, timeout_s=60)
    go()
    begin, cpu = time.time(), time.process_time()
    for part in batches(groups, max(1, case["batch"] // case["group"])):
        await buffer.put_many([(group, group) for group in part])
    end, cpu = time.time(), time.process_time() - cpu
    await buffer.close()
    return {"begin": begin, "end": end, "cpu_s": cpu}


async def _ours_lease(case: dict[str, Any], go: Callable[[], None]) -> dict[str, Any]:
    buffer = open_buffer(settings_of(case), Path(case["folder"]))
    await buffer.join_run(RUN, timeout_s=60)
    go()
    begin, cpu, num = time.time(), time.process_time(), 0
    while leases := await buffer.lease(max(1, case["batch"] // case["group"]), wait=False):
        num += sum(len(lease.group) for lease in leases)
    end, cpu = time.time(), time.process_time() - cpu
    await buffer.close()
    assert num == case["num"], f"leased {num} of {case['num']}"
    return {"begin": begin, "end": end, "cpu_s": cpu}


# ------------------------------------------------------------------------------------------------------ bare


def connect_bare(case: dict[str, Any]) -> tuple[Any, str]:
    """A connection of the driver alone, and its placeholder."""
    if case["store"]["use"] == "sqlite":
        connection = sqlite3.connect(Path(case["folder"]) / "bare.sqlite", timeout=30, isolation_level=None)
        for pragma in ("page_size = 8192", "journal_mode = WAL", "synchronous = NORMAL", "wal_autocheckpoint = 4000"):
            connection.execute(f"PRAGMA {pragma}")
        return connection, "?"
    import psycopg

    return psycopg.connect(case["store"]["url"], autocommit=True), "%s"


def make_bare_table(case: dict[str, Any]) -> None:
    """An empty table, with an index of what has not been taken."""
    connection, _ = connect_bare(case)
    is_sqlite = case["store"]["use"] == "sqlite"
    key, blob = ("INTEGER PRIMARY KEY", "BLOB") if is_sqlite else ("BIGSERIAL PRIMARY KEY", "BYTEA")
    connection.execute("DROP TABLE IF EXISTS bare_items")
    connection.execute(f"CREATE TABLE bare_items (id {key}, taken INTEGER NOT NULL DEFAULT 0, item {blob} NOT NULL)")
    connection.execute("CREATE INDEX bare_free ON bare_items (id) WHERE taken = 0")
    connection.close()


def _bare_write(case: dict[str, Any], go: Callable[[], None]) -> dict[str, Any]:
    groups = make_records(case["writer"], case["num"] // case["group"], case["group"], case["tokens"])
    items = [(encode_group(group.with_records([row])),) for group in groups for row in group.records]
    connection, mark = connect_bare(case)
    sql = f"INSERT INTO bare_items (item) VALUES ({mark})"
    begin_sql = "BEGIN IMMEDIATE" if mark == "?" else "BEGIN"
    go()
    begin, cpu = time.time(), time.process_time()
    for part in batches(items, case["batch"]):
        cursor = connection.cursor()
        cursor.execute(begin_sql)
        cursor.executemany(sql, part)
        cursor.execute("COMMIT")
    end, cpu = time.time(), time.process_time() - cpu
    connection.close()
    return {"begin": begin, "end": end, "cpu_s": cpu, "bytes": sum(len(item) for (item,) in items)}


def _bare_lease(case: dict[str, Any], go: Callable[[], None]) -> dict[str, Any]:
    connection, mark = connect_bare(case)
    lock, begin_sql = ("", "BEGIN IMMEDIATE") if mark == "?" else (" FOR UPDATE SKIP LOCKED", "BEGIN")
    select = f"SELECT id, item FROM bare_items WHERE taken = 0 ORDER BY id LIMIT {case['batch']}{lock}"
    go()
    begin, cpu, num = time.time(), time.process_time(), 0
    while True:
        cursor = connection.cursor()
        cursor.execute(begin_sql)
        rows = cursor.execute(select).fetchall()
        cursor.executemany(f"UPDATE bare_items SET taken = 1 WHERE id = {mark}", [(row[0],) for row in rows])
        cursor.execute("COMMIT")
        if not rows:
            break
        num += len(rows)
    end, cpu = time.time(), time.process_time() - cpu
    connection.close()
    assert num == case["num"], f"took {num} of {case['num']}"
    return {"begin": begin, "end": end, "cpu_s": cpu}


def main() -> None:
    """Work on the case that the command line names."""
    case = json.loads(sys.argv[1])

    def go() -> None:
        print("ready", flush=True)
        sys.stdin.readline()

    side = case["side"]
    if side == "ours_write":
        found = asyncio.run(_ours_write(case, go))
    elif side == "ours_lease":
        found = asyncio.run(_ours_lease(case, go))
    else:
        found = {"bare_write": _bare_write, "bare_lease": _bare_lease}[side](case, go)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
