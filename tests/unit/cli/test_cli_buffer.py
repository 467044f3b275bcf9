"""`triune buffer …` on a store with two groups."""

import asyncio
import json

import pytest
from test_cli_commands import RUN, triune

from triune.buffer import open_buffer
from triune.cli.closing import WIDTH, first_and_last_rollout, side_by_side
from triune.config import load_config, save_resolved
from triune.ports import AdmissionRule
from triune.records import Task
from triune.testing.batches import group


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first.yaml").write_text(RUN)
    config = load_config("first.yaml")
    save_resolved(config, config.run_dir)

    async def fill():
        buffer = open_buffer(config.buffer, config.run_dir)
        await buffer.open_run("first", config_hash="x", data_hash="y")
        for key, rewards, dropped_by in (("a", [1.0, 0.0], ""), ("b", [0.0, 0.0], "drop_flat_groups")):
            task = Task(key=key, data={"question": "1+1="})
            identity = await buffer.admit(task, AdmissionRule(max_staleness=0, fresh=2))
            made = group(rewards)
            rows = [
                row.replace(
                    id=type(row.id)(type(row.id.rollout)(identity, number)),
                    messages=[{"role": "assistant", "content": f"answer {number}"}],
                )
                for number, row in enumerate(made.experiences)
            ]
            raw = type(made)(id=identity, task=task, records=tuple(rows))
            await buffer.put(raw, None if dropped_by else raw, dropped_by=dropped_by)
        await buffer.close()

    asyncio.run(fill())
    return "first"


def test_ls_prints_entries_newest_first_with_state_and_reward(capsys, run):
    code, out, _ = triune(capsys, "buffer", "ls", run)
    lines = out.splitlines()
    assert code == 0
    assert lines[1].split("\t")[:3] == ["first/train/b/0", "dropped (drop_flat_groups)", "0.000"]
    assert lines[2].split("\t")[:3] == ["first/train/a/0", "ready", "0.500"]


def test_ls_filters_by_state_and_prints_json(capsys, run):
    found = json.loads(triune(capsys, "buffer", "ls", "runs/first", "--state", "ready", "--json")[1])
    assert [row["entry"] for row in found] == ["first/train/a/0"]


def test_show_prints_rollouts_with_reward_and_messages(capsys, run):
    code, out, _ = triune(capsys, "buffer", "show", run, "first/train/a/0")
    assert code == 0
    assert "rollout 0.0  reward 1" in out
    assert "assistant: answer 1" in out


def test_stats_count_states(capsys, run):
    stats = json.loads(triune(capsys, "buffer", "stats", run, "--json")[1])
    assert (stats["entries/ready"], stats["entries/dropped"], stats["admitted"]) == (1, 1, 2)


def test_export_writes_jsonl_and_parquet(capsys, run, tmp_path):
    assert "2 groups" in triune(capsys, "buffer", "export", run, "all.jsonl")[1]
    assert len((tmp_path / "all.jsonl").read_text().splitlines()) == 2
    assert "1 groups" in triune(capsys, "buffer", "export", run, "ready.jsonl", "--state", "ready")[1]
    assert "4 experiences" in triune(capsys, "buffer", "export", run, "all.parquet")[1]
    from pyarrow import parquet

    rows = parquet.read_table(tmp_path / "all.parquet").to_pylist()
    assert sorted(row["reward"] for row in rows) == [0.0, 0.0, 0.0, 1.0]
    assert all(len(row["tokens"]) == len(row["action_mask"]) for row in rows)


def test_a_rollout_before_and_one_after_stand_side_by_side(run):
    config = load_config("first.yaml")
    pair = first_and_last_rollout(config, config.run_dir)
    lines = side_by_side(*pair)
    assert lines[0].startswith("before: version")
    assert lines[1].split() == ["assistant:", "answer", "0"] * 2
    assert lines[0].index("after:") == WIDTH + 2


def test_export_refuses_a_name_whose_format_it_cannot_tell(capsys, run):
    code, _, err = triune(capsys, "buffer", "export", run, "all.csv")
    assert code == 2
    assert ".jsonl or .parquet" in err
