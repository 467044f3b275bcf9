"""What calls that share a transaction leave behind when one fails, or when nobody can tell what became of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from triune.buffer import StoredBuffer
from triune.buffer.database import OutcomeUnknown
from triune.errors import StoreError
from triune.records import Task
from triune.testing.buffers import ROOMY, BufferWorld, fill, run


def test_calls_whose_commit_was_perhaps_carried_out_are_told_so_and_never_repeated(
    world: BufferWorld, monkeypatch: pytest.MonkeyPatch
):
    async def work() -> None:
        buffer = await world.start()
        await fill(buffer, 4)
        db: Any = buffer.store.db
        commit = db._commit

        def vanish() -> None:
            commit()
            monkeypatch.setattr(db, "_commit", commit)
            raise OutcomeUnknown(db.where, "the connection broke during a commit")

        monkeypatch.setattr(db, "_commit", vanish)
        calls = (buffer.lease(1, wait=False), buffer.admit(Task(key="new"), ROOMY))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(answer) for answer in answers] == [OutcomeUnknown, OutcomeUnknown]
        stats = await buffer.stats()
        assert (stats["uses/leased"], stats["admitted"]) == (1, 5)

    run(work())


def test_an_index_whose_transaction_was_rolled_back_is_made_by_the_next_that_needs_it(world: BufferWorld):
    async def fail(buffer: StoredBuffer) -> None:
        await buffer._writer.submit(lambda: buffer.store.db.execute("INSERT INTO nothing VALUES (1)"))

    async def work() -> None:
        buffer = await world.start()
        await fill(buffer, 2)
        calls = (buffer.lease(1, order="reward", wait=False), fail(buffer))
        leases, failure = await asyncio.gather(*calls, return_exceptions=True)
        assert (len(leases), type(failure)) == (1, StoreError)
        found = buffer.store.db.all("SELECT name FROM sqlite_master WHERE name = 'entries_reward'")
        assert found == [("entries_reward",)]

    run(work())
