"""Killed processes, several processes, and random histories: nothing lost, nothing twice."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from triune.buffer import BufferSettings, SegmentSettings, StoredBuffer, open_buffer
from triune.buffer.stores.postgres import Postgres
from triune.buffer.stores.sqlite import SQLite
from triune.buffer.verify import verify
from triune.errors import ConfigError, TriuneError
from triune.failpoints import arm_failpoints, failpoint
from triune.ports import AdmissionRule
from triune.records import GroupId, Task
from triune.testing import postgres
from triune.testing.groups import make_group, with_mean_advantages

NUM_TASKS, NUM_PER_STEP = 24, 4

URL = "TRIUNE_TEST_URL"
"""Tells the spawned processes that they work on a server."""

SEGMENTS = "TRIUNE_TEST_SEGMENTS"
"""Tells them where to keep all blobs."""

on_every_store = pytest.mark.usefixtures("store")


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "postgres":
        url = postgres.server_url()
        if url is None:
            pytest.skip(postgres.MISSING)
        monkeypatch.setenv(URL, url)


def open_at(folder: Path, **settings: Any) -> StoredBuffer:
    store = Postgres(url=os.environ[URL]) if URL in os.environ else SQLite()
    if SEGMENTS in os.environ:
        settings["segments"] = SegmentSettings(url=os.environ[SEGMENTS], min_bytes=0, roll_bytes=5000)
    return open_buffer(BufferSettings(store=store, **settings), folder, reshape=with_mean_advantages)


def spawn(role: str, folder: Path, **env: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, role, str(folder)], env={**os.environ, **env})


# ------------------------------------------------------------------------------ a flywheel without a model


async def explore(buffer: StoredBuffer) -> None:
    """Admit tasks in order from the cursor, re-dispatch open ones, put."""

    async def put(group: GroupId) -> None:
        version = await buffer.latest_version()
        raw = make_group(group, version=version.version if version else 0)
        await buffer.put(raw, with_mean_advantages(raw))

    rule = AdmissionRule(max_staleness=0, fresh=NUM_PER_STEP)
    while (group := await buffer.readmit(rule, max_retries=0)) is not None:
        await put(group)
    row = (await buffer.cursor() or {"row": 0})["row"]
    while row < NUM_TASKS:
        group = await buffer.admit(Task(key=f"t{row}"), rule, cursor={"row": row + 1})
        if group is None:
            return
        row += 1
        await put(group)
    await buffer.end("the tasks ran out")


async def train(buffer: StoredBuffer, folder: Path) -> None:
    """Lease, publish, save every second step to a file (renamed into place), acknowledge."""
    from triune.ports import WeightUpdate

    async def publish(step: int) -> int:
        version = await buffer.begin_version(step)
        await buffer.commit_version(WeightUpdate(version=version, step=step, digest="", dtype="float32"))
        return version

    step, version, trained = load(folder)
    if version < 0:
        version = await publish(0)
    uses: list[tuple[str, int]] = []
    while leases := await buffer.lease(NUM_PER_STEP, max_staleness=0):
        uses += [(lease.entry, lease.use_no) for lease in leases]
        step += 1
        version = await publish(step)
        failpoint("trainer.publish.after")
        if step % 2 == 0:
            trained = [*trained, *uses]
            save(folder, step, version, trained)
            failpoint("trainer.checkpoint.after_rename")
            await buffer.ack(uses, checkpoint=f"step-{step}", step=step)
            uses = []
    if uses:
        save(folder, step, version, [*trained, *uses])
        await buffer.ack(uses, checkpoint=f"step-{step}", step=step)
    await buffer.finish("all steps done")


def save(folder: Path, step: int, version: int, trained: list[tuple[str, int]]) -> None:
    partial = folder / "checkpoint.partial"
    partial.write_text("\n".join([f"{step} {version}", *(f"{entry} {use}" for entry, use in trained)]))
    partial.replace(folder / "checkpoint")


def load(folder: Path) -> tuple[int, int, list[tuple[str, int]]]:
    if not (folder / "checkpoint").exists():
        return 0, -1, []
    head, *rest = (folder / "checkpoint").read_text().splitlines()
    step, version = map(int, head.split())
    return step, version, [(line.split()[0], int(line.split()[1])) for line in rest]


async def fly(folder: Path) -> None:
    buffer = open_at(folder)
    await buffer.open_run("r", config_hash="c", data_hash="d")
    step, version, trained = load(folder)
    await buffer.resume_at(step=step, version=version, consumed=trained, checkpoint=f"step-{step}", strict=True)
    trainer = asyncio.ensure_future(train(buffer, folder))
    await buffer.wait_version(-1)
    await explore(buffer)
    await trainer
    await buffer.close()


def trained_tasks(folder: Path) -> list[str]:
    """Task of every use in the ancestry of the last checkpoint, and a check that the store agrees."""

    async def work() -> list[str]:
        buffer = open_at(folder)
        await buffer.check_conservation()
        stats = await buffer.stats()
        assert stats["uses/leased"] == 0
        spent = await buffer.browse(state="spent", limit=1000)
        await buffer.close()
        return sorted(GroupId.parse(info.entry).task_key for info in spent)

    uses = load(folder)[2]
    assert len(set(uses)) == len(uses), "a use entered the weights twice"
    tasks = sorted(GroupId.parse(entry).task_key for entry, _ in uses)
    assert asyncio.run(work()) == tasks
    return tasks


@on_every_store
@pytest.mark.parametrize(
    "failpoints",
    [
        "buffer.put.inside:1",
        "buffer.put.inside:9",
        "buffer.admit.inside:6",
        "buffer.ack.inside:2",
        "buffer.commit_version.inside:3",
        "trainer.publish.after:3",
        "trainer.publish.after:4",
        "trainer.checkpoint.after_rename:1",
    ],
)
def test_case_38_killed_at_a_failpoint_a_resumed_run_trains_the_same_tasks(tmp_path: Path, failpoints: str):
    first = spawn("fly", tmp_path, TRIUNE_FAILPOINT=failpoints)
    assert first.wait(20) == -signal.SIGKILL
    assert spawn("fly", tmp_path).wait(20) == 0
    assert trained_tasks(tmp_path) == sorted(f"t{n}" for n in range(NUM_TASKS))


@on_every_store
@pytest.mark.parametrize("failpoints", ["buffer.segments.before_commit:1", "buffer.segments.before_commit:9"])
def test_killed_around_the_writing_of_a_segment_a_resumed_run_trains_the_same_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failpoints: str
):
    monkeypatch.setenv(SEGMENTS, str(tmp_path / "segments"))
    first = spawn("fly", tmp_path, TRIUNE_FAILPOINT=failpoints)
    assert first.wait(60) == -signal.SIGKILL
    assert spawn("fly", tmp_path).wait(60) == 0
    assert trained_tasks(tmp_path) == sorted(f"t{n}" for n in range(NUM_TASKS))
    buffer = open_at(tmp_path)
    assert buffer.store.blobs.settings is not None
    found = verify(buffer.store)
    assert (found.findings, found.num_unreferenced_bytes > 0) == ((), True)
    buffer.abandon()


@on_every_store
def test_case_56_what_a_killed_process_committed_is_there_for_the_next_one(tmp_path: Path):
    process = spawn("fly", tmp_path, TRIUNE_FAILPOINT="buffer.put.inside:4")
    assert process.wait(20) == -signal.SIGKILL

    async def work() -> None:
        buffer = open_at(tmp_path)
        await buffer.open_run("r", config_hash="c", data_hash="d")
        stats = await buffer.check_conservation()
        assert stats["puts"] == 3
        assert len(await buffer.open_admissions()) == 1
        assert len(await buffer.lease(3, wait=False)) == 3
        await buffer.close()

    asyncio.run(work())


@on_every_store
def test_a_kill_while_a_leased_entry_is_amended_leaves_the_amendment_undone_and_repeatable(tmp_path: Path):
    process = spawn("amend", tmp_path, TRIUNE_FAILPOINT="buffer.amend.leased:1")
    assert process.wait(20) == -signal.SIGKILL

    async def work() -> None:
        buffer = open_at(tmp_path)
        await buffer.open_run("r", config_hash="", data_hash="")
        await buffer.resume_at(step=0, version=0, consumed=[], checkpoint="", strict=True)
        assert await buffer.amendments("r/train/a/0") == []
        assert await buffer.amend("r/train/a/0", {"reward": 0.5}, by="ann", key="k") == "applied"
        await buffer.check_conservation()
        await buffer.close()

    asyncio.run(work())


async def amend_while_leased(folder: Path) -> None:
    buffer = open_at(folder)
    await buffer.open_run("r", config_hash="", data_hash="")
    group = await buffer.admit(Task(key="a"), AdmissionRule(max_staleness=0, fresh=9))
    assert group is not None
    await buffer.put(make_group(group), make_group(group))
    await buffer.lease(1)
    await buffer.amend(str(group), {"reward": 0.5}, by="ann", key="k")


# ------------------------------------------------------------------------------------- several processes


@on_every_store
def test_two_exploring_processes_and_a_trainer_share_one_store_and_use_every_group_once(tmp_path: Path):
    async def work() -> None:
        buffer = open_at(tmp_path)
        await buffer.open_run("r", config_hash="", data_hash="")
        explorers = [spawn(f"explore{n}", tmp_path) for n in range(2)]
        seen: list[str] = []
        while len(seen) < 40:
            leases = await asyncio.wait_for(buffer.lease(5), 20)
            seen += [lease.entry for lease in leases]
            await buffer.ack([(lease.entry, lease.use_no) for lease in leases], checkpoint="c", step=len(seen))
        await buffer.finish("enough")
        assert [await asyncio.to_thread(explorer.wait, 20) for explorer in explorers] == [0, 0]
        assert len(set(seen)) == 40
        assert {GroupId.parse(entry).taskset for entry in seen} == {"from0", "from1"}
        await buffer.check_conservation()
        await buffer.close()

    asyncio.run(work())


async def explore_beside(folder: Path, name: str) -> None:
    """Put 20 groups, then wait for the trainer to finish: every wake-up crosses the process border."""
    buffer = open_at(folder)
    await buffer.join_run("r", timeout_s=10)
    rule = AdmissionRule(max_staleness=0, fresh=1000)
    for number in range(20):
        group = await buffer.admit(Task(key=str(number), taskset=name), rule)
        assert group is not None
        await buffer.put(make_group(group), make_group(group))
    assert await buffer.wait_version(10**6) is None
    assert await buffer.admit(Task(key="more", taskset=name), rule) is None
    await buffer.close()


# ---------------------------------------------------------------------------------------------- failpoints


def test_failpoints_do_nothing_until_armed_and_fire_at_the_chosen_pass():
    failpoint("nowhere")
    try:
        arm_failpoints("here:2:raise,there:1:raise")
        failpoint("here")
        with pytest.raises(TriuneError, match="failpoint here: pass 2"):
            failpoint("here")
        failpoint("here")
        with pytest.raises(ConfigError, match="name:count"):
            arm_failpoints("here")
    finally:
        arm_failpoints("")
    failpoint("there")


if __name__ == "__main__":
    role, where = sys.argv[1], Path(sys.argv[2])
    if role == "fly":
        asyncio.run(fly(where))
    elif role == "amend":
        asyncio.run(amend_while_leased(where))
    else:
        asyncio.run(explore_beside(where, role.replace("explore", "from")))
