"""One suite over every weight channel."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from triune import registry
from triune.errors import ConfigError, EngineError, StoreError
from triune.models import weight_digest
from triune.ports import WeightUpdate
from triune.testing.lanes import InlineLane
from triune.testing.ledgers import MemoryLedger

Open = Callable[..., Any]


@pytest.fixture(params=["memory", "files"])
def open_channel(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    def build(ledger: MemoryLedger, *, epoch: int = 1, dtype: str = "auto", **fields: Any) -> Any:
        channel = registry.build("channel", {"use": request.param, **fields}, "sync.channel")
        return channel(ledger=ledger, lane=InlineLane(), folder=tmp_path / "weights", dtype=dtype, epoch=epoch)

    return build


def state_of(value: float) -> dict[str, torch.Tensor]:
    return {
        "a": torch.full((3, 5), float(value)),
        "b": torch.full((7,), value + 0.001),
        "steps": torch.tensor([int(value)]),
    }


def run(work: Any) -> Any:
    return asyncio.run(work)


def test_what_is_fetched_is_what_was_published_under_the_number_the_ledger_issued(open_channel: Open):
    async def go() -> None:
        ledger = MemoryLedger()
        channel = open_channel(ledger, keep=2)
        first = await channel.publish(state_of(1), step=0)
        second = await channel.publish(state_of(2), step=4)
        assert [first.version, second.version] == [0, 1]
        assert [second.step, second.epoch, second.dtype] == [4, 1, "float32"]
        assert ledger.committed == [first, second]
        for update, value in ((first, 1), (second, 2)):
            tensors = await channel.fetch(update)
            assert tensors.keys() == state_of(value).keys()
            assert all(torch.equal(tensors[name], want) for name, want in state_of(value).items())
            assert weight_digest(tensors) == update.digest

    run(go())


def test_published_weights_do_not_alias_what_the_optimiser_changes_in_place(open_channel: Open):
    async def go() -> None:
        channel = open_channel(MemoryLedger())
        live = state_of(1)
        update = await channel.publish(live, step=0)
        fetched = await channel.fetch(update)
        for tensor in live.values():
            tensor.add_(1)
        for tensors in (fetched, await channel.fetch(update)):
            assert all(torch.equal(tensors[name], want) for name, want in state_of(1).items())

    run(go())


def test_floating_tensors_are_published_in_the_asked_dtype_and_the_digest_is_of_that(open_channel: Open):
    async def go() -> None:
        channel = open_channel(MemoryLedger(), dtype="bfloat16")
        update = await channel.publish(state_of(1), step=0)
        assert update.dtype == "bfloat16"
        tensors = await channel.fetch(update)
        assert {name: value.dtype for name, value in tensors.items()} == {
            "a": torch.bfloat16,
            "b": torch.bfloat16,
            "steps": torch.int64,
        }
        assert weight_digest(tensors) == update.digest

    run(go())


def test_only_the_newest_versions_are_kept_and_a_pinned_one(open_channel: Open):
    async def go() -> None:
        channel = open_channel(MemoryLedger(), keep=2)
        updates = [await channel.publish(state_of(0), step=0)]
        channel.pin(0)
        for step in range(1, 5):
            updates.append(await channel.publish(state_of(step), step=step))
        assert (await channel.fetch(updates[0]))["a"][0, 0] == 0
        with pytest.raises(EngineError, match="no longer kept; expected one of 0, 3, 4"):
            await channel.fetch(updates[1])
        channel.unpin(0)
        await channel.publish(state_of(5), step=5)
        with pytest.raises(EngineError, match="no longer kept"):
            await channel.fetch(updates[0])

    run(go())


def test_a_version_that_the_engine_has_taken_is_freed_unless_it_is_pinned():
    async def go() -> None:
        channel = registry.build("channel", "memory", "sync.channel")(ledger=MemoryLedger(), lane=InlineLane())
        first = await channel.publish(state_of(0), step=0)
        channel.pin(0)
        channel.release(0)
        assert await channel.fetch(first)
        channel.unpin(0)
        channel.release(0)
        with pytest.raises(EngineError, match="no longer kept"):
            await channel.fetch(first)

    run(go())


def test_who_asks_for_an_old_version_while_the_next_is_published_is_told_when_that_one_is_there():
    class SlowLane(InlineLane):
        async def run(self, work: Any, *args: Any) -> Any:
            await asyncio.sleep(0.02)
            return await super().run(work, *args)

    async def go() -> None:
        ledger = MemoryLedger()
        channel = registry.build("channel", "memory", "sync.channel")(ledger=ledger, lane=SlowLane())
        first = await channel.publish(state_of(0), step=0)
        publishing = asyncio.create_task(channel.publish(state_of(1), step=1))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="expected one of 1"):
            await channel.fetch(first)
        assert (await channel.fetch(await publishing))["a"][0, 0] == 1

    run(go())


def test_a_fetched_version_stays_readable_when_it_is_pruned(open_channel: Open):
    async def go() -> None:
        channel = open_channel(MemoryLedger(), keep=1)
        update = await channel.publish(state_of(7), step=0)
        tensors = await channel.fetch(update)
        await channel.publish(state_of(8), step=1)
        assert torch.equal(tensors["a"], state_of(7)["a"])

    run(go())


def test_after_a_resume_a_version_is_offered_again_only_with_its_own_weights(open_channel: Open):
    async def go() -> None:
        ledger = MemoryLedger()
        update = await open_channel(ledger, keep=1).publish(state_of(3), step=6)
        resumed = open_channel(ledger, epoch=2)
        await resumed.restore(update, state_of(3))
        assert torch.equal((await resumed.fetch(update))["b"], state_of(3)["b"])
        with pytest.raises(EngineError, match="digest"):
            await resumed.restore(update, state_of(4))

    run(go())


def test_a_version_that_nobody_published_is_refused(open_channel: Open):
    ghost = WeightUpdate(version=99, step=0, digest="0" * 16, dtype="float32")
    with pytest.raises(EngineError, match="version 99"):
        run(open_channel(MemoryLedger()).fetch(ghost))


def test_a_brick_may_fix_the_dtype_whatever_the_engine_wants():
    channel = registry.build("channel", {"use": "memory", "dtype": "float32"}, "sync.channel")
    opened = channel(ledger=MemoryLedger(), lane=InlineLane(), dtype="bfloat16")
    assert run(opened.publish(state_of(1), step=0)).dtype == "float32"


def test_files_written_by_one_process_are_read_by_another(tmp_path: Path):
    async def go() -> None:
        ledger, brick = MemoryLedger(), registry.build("channel", "files", "sync.channel")
        writer = brick(ledger=ledger, lane=InlineLane(), folder=tmp_path)
        update = await writer.publish(state_of(1), step=0)
        reader = brick(ledger=MemoryLedger(), lane=InlineLane(), folder=tmp_path)
        assert torch.equal((await reader.fetch(update))["a"], state_of(1)["a"])

    run(go())


def test_a_half_written_version_is_never_seen_and_goes_with_the_next_one(tmp_path: Path):
    async def go() -> None:
        brick = registry.build("channel", "files", "sync.channel")
        channel = brick(ledger=MemoryLedger(), lane=InlineLane(), folder=tmp_path)
        await channel.publish(state_of(1), step=0)
        (tmp_path / ".v00000001.77.partial").mkdir()
        (tmp_path / ".v00000001.77.partial" / "weights.safetensors").write_bytes(b"half")
        assert channel.versions() == [0]
        await channel.publish(state_of(2), step=1)
        assert not list(tmp_path.glob(".*"))

    run(go())


def test_pins_of_an_earlier_incarnation_do_not_keep_files_for_ever(tmp_path: Path):
    async def go() -> None:
        ledger, brick = MemoryLedger(), registry.build("channel", {"use": "files", "keep": 1}, "sync.channel")
        first = brick(ledger=ledger, lane=InlineLane(), folder=tmp_path, epoch=1)
        await first.publish(state_of(1), step=0)
        first.pin(0)
        await first.publish(state_of(2), step=1)
        assert first.versions() == [0, 1]
        second = brick(ledger=ledger, lane=InlineLane(), folder=tmp_path, epoch=2)
        await second.publish(state_of(3), step=2)
        assert second.versions() == [2]
        assert not list(tmp_path.glob("*.pin"))


def test_files_are_found_where_this_process_sees_the_folder(tmp_path: Path):
    async def go() -> None:
        ledger, brick = MemoryLedger(), registry.build("channel", "files", "sync.channel")
        update = await brick(ledger=ledger, lane=InlineLane(), folder=tmp_path / "there").publish(state_of(1), step=0)
        (tmp_path / "there").rename(tmp_path / "here")
        reader = brick(ledger=ledger, lane=InlineLane(), folder=tmp_path / "here")
        assert torch.equal((await reader.fetch(update))["a"], state_of(1)["a"])

    run(go())


def test_a_folder_that_cannot_be_written_is_a_store_error_and_commits_nothing(tmp_path: Path):
    async def go() -> None:
        (tmp_path / "taken").write_text("a file where the folder should be")
        ledger, brick = MemoryLedger(), registry.build("channel", "files", "sync.channel")
        channel = brick(ledger=ledger, lane=InlineLane(), folder=tmp_path / "taken")
        with pytest.raises(StoreError, match="cannot be written"):
            await channel.publish(state_of(1), step=0)
        assert ledger.committed == []

    run(go())


def test_the_files_channel_without_a_folder_is_a_configuration_error():
    with pytest.raises(ConfigError, match=r"sync\.channel\.folder"):
        registry.build("channel", "files", "sync.channel")(ledger=MemoryLedger(), lane=InlineLane())
