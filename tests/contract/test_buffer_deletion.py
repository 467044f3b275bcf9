"""What is deleted is gone from wherever it is, is never leased again, and the books still balance."""

from __future__ import annotations

from pathlib import Path

import pytest

from triune.buffer import BufferSettings, StoredBuffer, open_buffer, redaction
from triune.buffer.export import export_entries
from triune.buffer.manifest import ManifestWriter, read_manifest
from triune.buffer.query_parser import parse_filter
from triune.buffer.redaction import Deleted, delete
from triune.buffer.stores.memory import Memory
from triune.errors import StoreError
from triune.records import GroupId
from triune.testing.buffers import ROOMY, BufferWorld, fill, publish, run, states
from triune.testing.groups import make_group

LEASE_S = 61
PATCH = {"members": {"0": {"reward": 0.25}}}


def deleted(buffer: StoredBuffer, text: str, *, is_dry: bool = False) -> Deleted:
    return delete(buffer.store, parse_filter(text), by="law", is_dry=is_dry)


async def use(buffer: StoredBuffer, step: int, max_uses: int) -> str:
    """Train a step on one entry; its name."""
    [lease] = await buffer.lease(1, step=step - 1, max_uses=max_uses, again=step > 1, wait=False)
    await buffer.ack([(lease.entry, lease.use_no)], checkpoint=f"c{step}", step=step)
    return lease.entry


def test_a_deleted_entry_of_which_a_resume_gives_one_of_two_uses_back_is_not_leased_and_keeps_its_slot(
    world: BufferWorld,
):
    async def work():
        first = await world.start()
        await publish(first, 0)
        [entry] = await fill(first, 1)
        for step in (1, 2):
            assert await use(first, step, max_uses=2) == entry
        assert deleted(first, "state = spent").num_entries == 1
        buffer = await world.start()
        await buffer.resume_at(step=1, version=0, consumed=[(entry, 1)], checkpoint="c1", strict=False)
        assert await buffer.lease(1, step=1, max_uses=2, again=True, wait=False) == []
        assert await states(buffer) == {entry: "evicted"}
        assert (await buffer.stats())["refunded"] == 0
        await buffer.check_conservation()
        later = await world.start()  # the newer checkpoint is there after all
        await later.resume_at(step=2, version=0, consumed=[(entry, 1), (entry, 2)], checkpoint="c2", strict=False)
        await later.check_conservation()
        await later.resume_at(step=0, version=0, consumed=[], checkpoint="c0", strict=False)
        assert (await later.stats())["refunded"] == 1
        assert await later.lease(1, step=1, wait=False) == []
        await later.check_conservation()

    run(work())


def test_a_slot_comes_back_by_a_deletion_only_where_no_step_was_trained_on_it(world: BufferWorld):
    async def work():
        buffer = await world.start()
        await publish(buffer, 0)
        [entry] = await fill(buffer, 1)
        await use(buffer, 1, max_uses=2)
        await fill(buffer, 1)
        assert deleted(buffer, f"entry = '{entry}'").states == {"ready": 1}
        assert (await buffer.stats())["refunded"] == 0
        assert await buffer.lease(1, step=1, max_uses=2, again=True, wait=False) == []
        assert deleted(buffer, "task_key = t1").states == {"ready": 1}
        assert (await buffer.stats())["refunded"] == 1
        await buffer.check_conservation()

    run(work())


def test_what_was_evicted_can_be_deleted_too(world: BufferWorld):
    async def work():
        buffer = await world.start(capacity=1)
        await fill(buffer, 2)
        assert deleted(buffer, "state = evicted").num_entries == 1
        assert deleted(buffer, "state = evicted").num_entries == 0
        await buffer.check_conservation()

    run(work())


def test_what_an_amendment_made_of_an_entry_is_deleted_with_it(world: BufferWorld):
    async def work():
        buffer = await world.start(reshape=lambda group: group)
        await publish(buffer, 0)
        [entry] = await fill(buffer, 1)
        await use(buffer, 1, max_uses=1)
        assert await buffer.amend(entry, PATCH, by="ann", key="k1") == "reissued"
        [made] = await buffer.lease(1, wait=False)
        for is_dry in (True, False):
            held = deleted(buffer, "task_key = t0", is_dry=is_dry)
            assert (held.num_entries, held.num_leased) == (0, 1)
        await buffer.ack([(made.entry, made.use_no)], checkpoint="c2", step=2)
        assert await buffer.amend(made.entry, PATCH, by="ann", key="k2") == "reissued"
        for is_dry in (True, False):
            found = deleted(buffer, "task_key = t0", is_dry=is_dry)
            assert (found.num_entries, found.num_leased) == (3, 0)
        for name in await states(buffer):
            group = await buffer.read(name)
            assert (group.records, group.task.data) == ((), {})
        assert deleted(buffer, "entry LIKE '%'").num_entries == 0
        await buffer.check_conservation()

    run(work())


def test_what_a_dead_trainer_held_is_deleted_and_its_checkpoint_may_still_contain_it(world: BufferWorld):
    async def work():
        first = await world.start()
        await publish(first, 0)
        used, left = await fill(first, 2)
        await first.lease(2, step=0)
        await first.amend(left, {"members": {"0": {"info": {"remark": "private"}}}}, by="ann", key="k")
        world.crash(first)
        other = world.open()
        assert deleted(other, "buffer = main").num_leased == 2
        world.time += LEASE_S
        for is_dry in (True, False):
            found = deleted(other, "buffer = main", is_dry=is_dry)
            assert (found.num_entries, found.num_leased) == (2, 0)
        await other.check_conservation()
        assert [(row["patch"], row["outcome"]) for row in await other.amendments(left)] == [({}, "expired")]
        stats = await other.stats()
        assert (stats["uses/leased"], stats["uses/returned"], stats["refunded"]) == (0, 2, 2)
        buffer = await world.start()
        await buffer.resume_at(step=1, version=0, consumed=[(used, 1)], checkpoint="c1", strict=False)
        assert await buffer.lease(2, wait=False) == []
        assert (await buffer.stats())["uses/acked"] == 1
        await buffer.check_conservation()

    run(work())


def test_a_trainer_that_wakes_up_after_what_it_holds_was_deleted_goes_on(world: BufferWorld):
    async def work():
        buffer = await world.start()
        [entry] = await fill(buffer, 1)
        [lease] = await buffer.lease(1, step=0)
        world.time += LEASE_S
        assert deleted(buffer, "task_key = t0").num_entries == 1
        await buffer.ack([(entry, lease.use_no)], checkpoint="c1", step=1)
        stats = await buffer.stats()
        assert (stats["uses/acked"], stats["entries/evicted"]) == (1, 1)
        await buffer.check_conservation()

    run(work())


def test_an_amendment_waits_for_the_run_that_has_the_entry_for_itself_however_late_its_heart_beats(world: BufferWorld):
    async def work():
        trainer = await world.start()
        judge = world.open()
        await judge.join_run("r", timeout_s=5)
        [entry] = await fill(trainer, 1)
        [lease] = await trainer.lease(1)
        world.time += LEASE_S
        assert await judge.amend(entry, PATCH, by="ann", key="k") == "deferred"
        await trainer.ack([(entry, lease.use_no)], checkpoint="c1", step=1)
        assert await judge.amend(entry, PATCH, by="ann", key="k") == "reissued"
        await judge.check_conservation()

    run(work())


def test_what_a_dead_run_leased_from_a_shared_buffer_is_corrected_for_the_others_and_can_be_deleted(
    world: BufferWorld,
):
    async def work():
        first = await world.start("a")
        for number in range(3):
            group = make_group(GroupId("i", "s", str(number), 0))
            await first.put(group, group, buffer="past")
        assert len(await first.lease(2, buffer="past", wait=False)) == 2
        other = await world.start("b")
        assert await other.amend("i/s/0/0", PATCH, by="ann", key="early") == "deferred"
        world.crash(first)
        world.time += LEASE_S
        assert await other.amend("i/s/1/0", PATCH, by="ann", key="late") == "applied"
        leases = await other.lease(2, buffer="past", wait=False)
        assert [lease.group.experiences[0].reward for lease in leases] == [0.25, 0.25]
        assert await other.amend("i/s/0/0", PATCH, by="ann", key="early") == "applied"
        found = deleted(other, "buffer = past")
        assert (found.num_entries, found.num_leased) == (1, 2)
        await other.give_back()
        assert deleted(other, "buffer = past").num_entries == 2
        await other.check_conservation()
        again = await world.start("a")
        await again.resume_at(step=1, version=-1, consumed=[("i/s/0/0", 1)], checkpoint="c1", strict=False)
        await again.check_conservation()

    run(work())


# ------------------------------------------------------------------------------------------------------- exports


def marked(out: Path) -> set[str]:
    """Entries that an export's manifest says are deleted."""
    manifest = read_manifest(out.with_name(out.name + ".manifest.json"))
    assert manifest is not None
    return manifest.redacted


def test_a_deletion_that_was_cut_off_is_told_to_exports_by_the_next_one(
    world: BufferWorld, monkeypatch: pytest.MonkeyPatch
):
    async def work():
        buffer = await world.start()
        entries = await fill(buffer, 3)
        out = world.folder / "out.jsonl"
        export_entries(buffer.store, parse_filter(""), out)
        with monkeypatch.context() as patch:
            patch.setattr(redaction, "_stub", breaks_at(3, redaction._stub))
            with pytest.raises(StoreError, match="cut off"):
                deleted(buffer, "buffer = main")
        assert deleted(buffer, "buffer = main").num_entries == 1
        assert marked(out) == set(entries)

    run(work())


def breaks_at(call: int, function):
    left = [call]

    def count(*arguments):
        left[0] -= 1
        if left[0] <= 0:
            raise StoreError("here", "cut off")
        return function(*arguments)

    return count


def test_what_is_deleted_while_it_is_exported_is_marked_in_the_export(
    world: BufferWorld, monkeypatch: pytest.MonkeyPatch
):
    async def work():
        buffer = await world.start()
        entries = await fill(buffer, 3)
        out, during = world.folder / "out.jsonl", list[Deleted]()

        def delete_first(self, *arguments, add=ManifestWriter.add):
            during.extend([] if during else [deleted(buffer, "task_key IN (t0, t2)")])
            add(self, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(ManifestWriter, "add", delete_first)
            assert export_entries(buffer.store, parse_filter(""), out).num_entries == 3
        assert during[0].unfinished_manifests == (f"{out}.manifest.json",)
        assert marked(out) == {entries[0], entries[2]}
        after = deleted(buffer, "buffer = main")
        assert (after.manifests, after.lost_manifests) == ({f"{out}.manifest.json": 1}, ())
        assert marked(out) == set(entries)

    run(work())


def test_an_export_that_fails_is_forgotten_and_the_one_it_was_to_replace_is_not(
    world: BufferWorld, monkeypatch: pytest.MonkeyPatch
):
    async def work():
        buffer = await world.start()
        entries = await fill(buffer, 1)
        out = world.folder / "out.jsonl"
        export_entries(buffer.store, parse_filter(""), out)
        with monkeypatch.context() as patch:
            patch.setattr(ManifestWriter, "add", breaks_at(1, ManifestWriter.add))
            for name in ("out.jsonl", "new.jsonl"):
                with pytest.raises(StoreError, match="cut off"):
                    export_entries(buffer.store, parse_filter(""), world.folder / name)
        found = deleted(buffer, "buffer = main")
        assert (found.lost_manifests, found.unfinished_manifests) == ((), ())
        assert marked(out) == set(entries)
        out.with_name("out.jsonl.manifest.json").unlink()
        found = deleted(buffer, "buffer = main")
        assert (found.lost_manifests, found.unfinished_manifests) == ((f"{out}.manifest.json",), ())

    run(work())


def test_what_was_exported_before_its_group_was_made_again_is_marked_too(world: BufferWorld):
    async def work():
        buffer = await world.start()
        await publish(buffer, 0)
        [entry] = await fill(buffer, 1, version=0)
        out = world.folder / "out.jsonl"
        export_entries(buffer.store, parse_filter(""), out)
        for step in (1, 2):
            await publish(buffer, step)
        assert await buffer.lease(1, max_staleness=0, wait=False) == []
        assert str(await buffer.readmit(ROOMY, max_retries=2)) == entry
        assert deleted(buffer, "task_key = t0").num_entries == 1
        assert marked(out) == {entry}

    run(work())


def test_an_export_in_lines_has_a_manifest_too_and_another_store_takes_nothing_that_was_deleted(world: BufferWorld):
    async def work():
        buffer = await world.start()
        await fill(buffer, 3)
        out = world.folder / "past.lines"
        assert await buffer.export_jsonl(out) == 3
        assert deleted(buffer, "task_key != t1").manifests == {f"{out}.manifest.json": 2}
        other = open_buffer(BufferSettings(store=Memory()), world.folder)
        assert await other.import_jsonl(out, buffer="past") == 1
        assert await states(other) == {"r/train/t1/0": "ready"}
        await other.close()

    run(work())


def test_what_was_deleted_comes_back_under_no_other_name(world: BufferWorld):
    async def work():
        buffer = await world.start()
        await fill(buffer, 1)
        out = world.folder / "out.jsonl"
        await buffer.export_jsonl(out)
        assert deleted(buffer, "task_key = t0").num_entries == 1
        out.with_name("copy.jsonl").write_text(out.read_text().replace("r/train/t0/0", "q/train/t0/0"))
        assert await buffer.import_jsonl(out.with_name("copy.jsonl"), buffer="past") == 0

    run(work())
