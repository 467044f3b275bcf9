"""From an entry to the steps that were trained on it, and back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import triune.buffer
from triune.buffer import StoredBuffer
from triune.buffer.imports import import_file
from triune.buffer.query_parser import parse_filter
from triune.buffer.redaction import delete
from triune.errors import ConfigError, StoreError
from triune.testing.buffers import ROOMY, publish
from triune.testing.filled_stores import fill, in_buffer, make_store
from triune.testing.groups import make_group


def test_a_used_entry_names_its_task_weights_reward_and_the_step_with_its_checkpoint(tmp_path: Path):
    with triune.buffer.open(make_store(tmp_path)) as buffer:
        found = buffer.why("r/train/t0/0")
    assert (found.row.state, found.task.key, found.task.data["question"], found.visit, found.rounds) == (
        "spent", "t0", "6 x 7?", 0, 1
    )  # fmt: skip
    assert [(v.version, v.step, v.state, v.digest, v.num_tokens) for v in found.versions] == [
        (0, 0, "committed", "d", 12)
    ]
    assert [(r.id, r.reward, dict(r.reward_parts)) for r in found.records] == [
        ("r/train/t0/0/0.0/main.agent.0", 1.0, {"exact": 1.0}),
        ("r/train/t0/0/1.0/main.agent.0", 0.0, {"exact": 0.0}),
    ]
    assert [(r.revision, r.operators) for r in found.revisions] == [(0, ()), (1, ("advantage",))]
    [use] = found.uses
    assert (use.consumer, use.use_no, use.revision, use.state, use.step, use.checkpoint) == (
        "r", 1, 1, "acked", 1, "step-1"
    )  # fmt: skip


def test_a_rollout_and_an_experience_can_be_asked_for(tmp_path: Path):
    with triune.buffer.open(make_store(tmp_path)) as buffer:
        for identity in ("r/train/t2/0/1.0", "r/train/t2/0/1.0/main.agent.0"):
            assert [record.id for record in buffer.why(identity).records] == ["r/train/t2/0/1.0/main.agent.0"]
        with pytest.raises(StoreError, match=r"no such record; expected r/train/t2/0/0.0/main"):
            buffer.why("r/train/t2/0/7.0")


def test_people_stand_in_the_lineage_with_what_they_changed_and_what_was_made_of_it(tmp_path: Path):
    async def amend(buffer: StoredBuffer) -> None:
        await fill(buffer)
        assert await buffer.amend("r/train/t2/0", {"reward": 0.25}, by="ann", key="k1") == "applied"
        assert await buffer.amend("r/train/t0/0", {"members": {0: {"reward": -1.0}}}, by="bob", key="k2") == "reissued"

    in_buffer(tmp_path, amend)
    with triune.buffer.open(tmp_path / "buffer.sqlite") as buffer:
        [change] = buffer.why("r/train/t2/0").amendments
        assert (change.by, change.patch, change.outcome) == ("ann", {"reward": 0.25}, "applied")
        spent = buffer.why("r/train/t0/0")
        assert (spent.amendments[0].by, spent.amendments[0].outcome) == ("bob", "reissued")
        [child] = spent.children
        reissued = buffer.why(child)
        assert reissued.row.urgent
        assert reissued.records[0].source == "human"
        assert reissued.records[0].parents == ("r/train/t0/0/0.0/main.agent.0",)


def test_tokens_without_behaviour_are_counted_as_imitation_only(tmp_path: Path):
    async def put(buffer: StoredBuffer) -> None:
        await fill(buffer)
        group = await buffer.read("r/answers/a/0")
        [row] = group.experiences
        unknown = row.replace(logprobs=np.full(len(row), np.nan, np.float32))
        await buffer.revise("r/answers/a/0", group.with_records([unknown]), operators=["forget"])

    in_buffer(tmp_path, put)
    with triune.buffer.open(tmp_path / "buffer.sqlite") as buffer:
        found = buffer.why("r/answers/a/0")
    assert [(record.num_actions, record.num_unknown, record.tags) for record in found.records] == [
        (6, 6, ("gold", "math"))
    ]
    assert found.versions == ()
    assert found.revisions[-1].operators == ("forget",)


def test_a_step_names_the_entries_uses_and_revisions_it_was_trained_on(tmp_path: Path):
    with triune.buffer.open(make_store(tmp_path)) as buffer:
        assert [(u.entry, u.use_no, u.revision, u.state) for u in buffer.step(1, run="r")] == [
            ("r/train/t0/0", 1, 1, "acked")
        ]
        with pytest.raises(StoreError, match=r"step 2 of run 'r': it used nothing; expected a step from 1 to 1"):
            buffer.step(2, run="r")
        with pytest.raises(StoreError, match=r"that run used nothing; expected a run that trained: r"):
            buffer.step(1, run="other")


def test_a_use_that_a_resume_went_back_behind_is_returned_and_no_step_claims_it(tmp_path: Path):
    async def resume(buffer: StoredBuffer) -> None:
        await fill(buffer)
        await buffer.open_run("r", config_hash="", data_hash="")
        await buffer.resume_at(step=0, version=0, consumed=[], checkpoint="step-0", strict=False)
        await publish(buffer, 1)

    in_buffer(tmp_path, resume)
    with triune.buffer.open(tmp_path / "buffer.sqlite") as buffer:
        found = buffer.why("r/train/t0/0")
        assert [(use.state, use.step) for use in found.uses] == [("returned", None)]
        assert {version.state for version in buffer.why("r/train/t3/0").versions} == {"lost"}
        with pytest.raises(StoreError, match="used nothing"):
            buffer.step(1, run="r")


def test_an_entry_whose_group_was_made_again_can_be_followed_exported_and_deleted(tmp_path: Path):
    async def make_again(buffer: StoredBuffer) -> None:
        await fill(buffer)
        await buffer.open_run("r", config_hash="", data_hash="")
        await buffer.resume_at(step=1, version=0, consumed=[("r/train/t0/0", 1)], checkpoint="step-1", strict=True)
        group = await buffer.readmit(ROOMY, max_retries=0)
        assert str(group) == "r/train/t3/0"
        raw = make_group(group, rewards=(1.0, 0.5), prompt=9)
        await buffer.put(raw, raw)

    in_buffer(tmp_path, make_again)
    with triune.buffer.open(tmp_path / "buffer.sqlite") as buffer:
        assert buffer.verify().findings == ()
        old, new = buffer.entries("task_key = t3")
        assert (old.reason, new.entry, new.state) == ("lost", "r/train/t3/0", "ready")
        assert old.entry.startswith("r/train/t3/0~")
        assert [buffer.why(row.entry).rounds for row in (old, new)] == [2, 2]
        assert buffer.why(old.entry).records[0].reward is None
        for name in ("again.parquet", "again.jsonl"):
            assert buffer.export(tmp_path / name, "task_key = t3 AND buffer = main").num_entries == 2
            found = import_file(buffer.store, tmp_path / name, into=name, reader=lambda *_: ())
            assert (found.num_new, found.num_refused) == (1, 1)
        assert (
            delete(buffer.store, parse_filter("task_key = t3 AND buffer = main"), by="", is_dry=False).num_entries == 2
        )
        assert buffer.verify().findings == ()


@pytest.mark.parametrize("identity", ["t0", "r/train/t0", "r/train/t0/x", "r/train/t0/0/0", "a/b/c/0/0.0/x/y"])
def test_what_is_no_id_is_refused_with_the_form_of_one(tmp_path: Path, identity: str):
    with (
        triune.buffer.open(make_store(tmp_path)) as buffer,
        pytest.raises(ConfigError, match=r"no id of an entry.*expected run/taskset/task_key/visit"),
    ):
        buffer.why(identity)


def test_an_entry_that_is_not_there_says_how_to_list_them(tmp_path: Path):
    with (
        triune.buffer.open(make_store(tmp_path)) as buffer,
        pytest.raises(StoreError, match="list them with `triune buffer ls`"),
    ):
        buffer.why("r/train/nobody/0")
