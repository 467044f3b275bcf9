"""Steering, moving entries, and calls that fail (CONTRACTS C9)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from triune.buffer import BufferSettings, Database, open_buffer
from triune.buffer.stores.memory import Memory
from triune.errors import ConfigError, StoreError
from triune.records import Task
from triune.testing.buffers import ROOMY, BufferWorld, fill, run
from triune.testing.groups import make_group
from triune.testing.postgres import OnTestServer


def test_a_run_is_steered_by_rows_that_say_who_asked_and_who_answered(world: BufferWorld):
    async def work():
        buffer = await world.start()
        first = await buffer.steer("r", "pause", by="ann")
        second = await buffer.steer("r", "set", by="bob", fields={"trainer.learning_rate": 1e-6})
        rows = await buffer.control()
        assert [(row["id"], row["action"], row["by"]) for row in rows] == [
            (first, "pause", "ann"),
            (second, "set", "bob"),
        ]
        assert rows[1]["fields"] == {"trainer.learning_rate": 1e-6}
        await buffer.ack_control(first, by="trainer")
        assert [row["id"] for row in await buffer.control()] == [second]
        [done, _] = await buffer.control_history("r")
        assert (done["acked_by"], done["acked_at_s"], done["outcome"]) == ("trainer", 1000.0, "done")
        with pytest.raises(ConfigError, match="one of pause"):
            await buffer.steer("r", "explode", by="eve")

    run(work())


def test_exported_entries_can_be_imported_into_another_buffer(world: BufferWorld, tmp_path: Path):
    async def work():
        buffer = await world.start()
        await fill(buffer, 3, rewards=(1.0, 0.0))
        assert await buffer.export_jsonl(tmp_path / "out.jsonl") == 3
        other = open_buffer(BufferSettings(store=Memory()), tmp_path)
        assert [await other.import_jsonl(tmp_path / "out.jsonl", buffer="past") for _ in range(2)] == [3, 0]
        await other.open_run("new", config_hash="", data_hash="")
        leases = await other.lease(3, buffer="past")
        for lease in leases:
            original = await buffer.read(lease.entry)
            for got, want in zip(lease.group.experiences, original.experiences, strict=True):
                np.testing.assert_array_equal(got.logprobs, want.logprobs)
                np.testing.assert_array_equal(got.streams["advantages"], want.streams["advantages"])
                assert got.replace(**_no_arrays) == want.replace(**_no_arrays)
        await other.close()
        with pytest.raises(StoreError, match="cannot be written"):
            await buffer.export_jsonl(tmp_path / "none" / "out.jsonl")

    run(work())


_no_arrays: dict[str, Any] = {
    **dict.fromkeys(("tokens", "action_mask", "logprobs", "versions")),
    "streams": {},
    "messages": (),
    "operators": (),
}


def test_one_bad_call_does_not_take_the_calls_committed_with_it(world: BufferWorld):
    async def work():
        buffer = await world.start()
        groups = [await buffer.admit(Task(key=str(n)), ROOMY) for n in range(6)]
        puts = [buffer.put(make_group(group), make_group(group)) for group in groups]
        outcomes = await asyncio.gather(
            *puts[:3], buffer.ack([("no", 1)], checkpoint="", step=0), *puts[3:], return_exceptions=True
        )
        assert [isinstance(outcome, StoreError) for outcome in outcomes] == [False] * 3 + [True] + [False] * 3
        assert (await buffer.stats())["puts"] == 6
        await buffer.check_conservation()

    run(work())


DISKS = {
    "sqlite": (("PRAGMA max_page_count = 1",), ("PRAGMA max_page_count = 1000000",)),  # 1 = as many as there are
    "postgres": (
        (
            "CREATE FUNCTION disk_is_full() RETURNS trigger LANGUAGE plpgsql AS "
            "'BEGIN IF length(NEW.blob) > 9000 THEN RAISE EXCEPTION USING ERRCODE = ''disk_full''; END IF; "
            "RETURN NEW; END'",
            "CREATE TRIGGER disk_is_full BEFORE INSERT ON revisions FOR EACH ROW EXECUTE FUNCTION disk_is_full()",
        ),
        ("DROP TRIGGER disk_is_full ON revisions",),
    ),
}
"""How each store's disk is filled and freed again."""


def _do(db: Database, statements: Sequence[str]) -> None:
    for statement in statements:
        db.execute(statement)


def test_a_full_disk_loses_nothing_and_says_what_to_do(world: BufferWorld):
    async def work():
        buffer = await world.start(segments=None)  # the disk of the database; that of segments has a test of its own
        await fill(buffer, 1)
        fill_disk, free_space = DISKS["postgres" if isinstance(world.store, OnTestServer) else "sqlite"]
        db = buffer.store.db
        _do(db, fill_disk)
        group = await buffer.admit(Task(key="big"), ROOMY)
        big = make_group(group, answer=50_000)
        with pytest.raises(StoreError, match=r"disk is full .* expected .*; free space"):
            await buffer.put(big, big)
        _do(db, free_space)
        await buffer.check_conservation()
        assert await buffer.put(big, big) == str(group)
        assert len(await buffer.lease(2)) == 2

    run(work())


def test_the_conservation_check_finds_a_lost_entry(world: BufferWorld):
    async def work():
        buffer = await world.start()
        await fill(buffer, 2)
        await buffer.lease(1)
        db = buffer.store.db
        for harm, found in (
            ("UPDATE uses SET state = 'returned'", "granted uses differ"),
            ("DELETE FROM uses", "uses granted to r"),
            ("DELETE FROM entries WHERE seq = 2", "2 puts but"),
            ("UPDATE runs SET refunded = 1", "differ from their ledger"),
        ):
            with db.transaction():
                db.execute(harm)
            with pytest.raises(StoreError, match=found):
                await buffer.check_conservation()

    run(work())


def test_a_front_is_usable_from_one_event_loop_after_another(world: BufferWorld):
    buffer = asyncio.run(world.start())
    [entry] = asyncio.run(fill(buffer, 1))
    assert asyncio.run(buffer.lease(1))[0].entry == entry
