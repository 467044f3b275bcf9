"""A small store in which everything happened once: used, dropped, amended, waiting, made by a person."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from triune.buffer import BufferSettings, StoredBuffer, open_buffer
from triune.records import Group, GroupId, Source, Task
from triune.testing.buffers import ROOMY, publish
from triune.testing.groups import make_group, with_mean_advantages

USERS = {"t0": "ann", "t1": "bob", "t2": "ann", "t3": "cy"}
PROMPTS = {"t0": 4, "t1": 5, "t2": 6, "t3": 7}


async def put(buffer: StoredBuffer, key: str, rewards: tuple[float | None, ...], version: int, **options: Any) -> str:
    """Admit a task and put its group, shaped where no options say otherwise; the entry."""
    id_ = await buffer.admit(Task(key=key), ROOMY)
    assert id_ is not None, "there is always a slot"
    raw = with_user(make_group(id_, rewards=rewards, version=version, prompt=PROMPTS[key]), USERS[key])
    return await buffer.put(raw, None if options else with_mean_advantages(raw) or raw, **options)


def with_user(group: Group, user: str) -> Group:
    """The group with a user's name and words in its task's row."""
    task = msgspec.structs.replace(group.task, data={**group.task.data, "user_id": user, "note": f"secret of {user}"})
    return msgspec.structs.replace(group, task=task)


async def fill(buffer: StoredBuffer, run: str = "r") -> None:
    """t0 is spent by step 1, t1 dropped, t2 ready, t3 waits for a reward; one expert answer in another buffer."""
    await buffer.open_run(run, config_hash="", data_hash="")
    await publish(buffer, 0)
    await put(buffer, "t0", (1.0, 0.0), 0)
    await put(buffer, "t1", (1.0, 1.0), 0, dropped_by="drop_flat_groups")
    [lease] = await buffer.lease(1, step=0)
    await buffer.ack([(lease.entry, lease.use_no)], checkpoint="step-1", step=1)
    await put(buffer, "t2", (0.5, 0.0), 0)
    await publish(buffer, 1)
    await put(buffer, "t3", (None, 1.0), 1)
    answer = make_group(GroupId(run, "answers", "a", 0), rewards=(0.0,), version=-1, source=Source.EXPERT)
    tagged = [row.replace(info={"tags": ["gold", "math"]}) for row in answer.experiences]
    await buffer.stock([answer.with_records(tagged)], buffer="expert")


def make_store(folder: Path, run: str = "r", **settings: Any) -> Path:
    """The file of such a store; settings are those of section `buffer:`."""
    in_buffer(folder, fill, run, **settings)
    return folder / "buffer.sqlite"


def in_buffer(folder: Path, work: Any, *arguments: Any, **settings: Any) -> Any:
    """Do something with the buffer of a folder."""

    async def use() -> Any:
        buffer = open_buffer(BufferSettings(**settings), folder, reshape=with_mean_advantages)
        try:
            return await work(buffer, *arguments)
        finally:
            await buffer.close()

    folder.mkdir(parents=True, exist_ok=True)
    return asyncio.run(use())
