"""`triune buffer why|step|query|stats|export|import|gc|verify` on a store in which everything happened once."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from test_cli_commands import RUN, triune

from triune.buffer import SegmentSettings
from triune.config import load_config, save_resolved
from triune.testing.filled_stores import make_store


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first.yaml").write_text(RUN)
    config = load_config("first.yaml")
    save_resolved(config, config.run_dir)
    make_store(config.run_dir, "first")
    return "first"


def read(capsys, *words):
    code, out, err = triune(capsys, "buffer", *words, "--json")
    assert code == 0, err
    return json.loads(out)


def test_why_finds_the_run_in_the_id_and_prints_the_way_of_an_entry(capsys, run):
    code, out, _ = triune(capsys, "buffer", "why", "first/train/t0/0")
    assert code == 0
    for part in (
        "spent in buffer main, only for run first",
        "task t0 of train, visit 0",
        '"user_id": "ann"',
        "version 0, published after step 0 (committed, weights d): 12 tokens",
        "first/train/t0/0/0.0/main.agent.0: reward 1 (exact 1), 6 of 10 tokens sampled, policy, done",
        "1: advantage,",
        "use 1 of revision 1 by first, epoch 0: step 1, in checkpoint step-1",
    ):
        assert part in out, part
    found = read(capsys, "why", "runs/first", "first/train/t0/0/1.0")
    assert [record["id"] for record in found["records"]] == ["first/train/t0/0/1.0/main.agent.0"]
    assert found["uses"][0]["step"] == 1


def test_step_lists_what_it_was_trained_on_of_the_only_run_or_the_named_one(capsys, run):
    for words in (("1",), (run, "1"), ("runs/first/buffer.sqlite", "1", "--of", "first")):
        assert [use["entry"] for use in read(capsys, "step", *words)] == ["first/train/t0/0"]
    assert "first/train/t0/0\t1\t1\tacked\tstep-1" in triune(capsys, "buffer", "step", "1")[1]
    code, _, err = triune(capsys, "buffer", "step", run, "9")
    assert code == 1
    assert "a step from 1 to 1" in err
    assert "the run whose step it is" in triune(capsys, "buffer", "step", "runs/first/buffer.sqlite", "1")[2]


def test_query_prints_counts_and_refuses_with_a_suggestion(capsys, run):
    assert [row["entry"] for row in read(capsys, "query", run, "data.user_id = ann")] == [
        "first/train/t2/0", "first/train/t0/0"
    ]  # fmt: skip
    assert triune(capsys, "buffer", "query", run, "state = ready", "--count")[1] == "2 entries\n"
    assert (
        "first/train/t1/0\tdropped (drop_flat_groups)\t1.000" in triune(capsys, "buffer", "query", run, "uses = 0")[1]
    )
    code, out, err = triune(capsys, "buffer", "query", run, "sate = ready")
    assert (code, out) == (2, "")
    assert "did you mean `state`?" in err


def test_stats_draw_a_histogram_of_each_source_and_keep_the_totals_at_the_top_of_the_json(capsys, run):
    out = triune(capsys, "buffer", "stats", run)[1]
    assert "reward of policy: 4 entries, mean 0.688" in out
    assert "0.925 … 1  " + "█" * 40 + " 2" in out
    assert "staleness of ready entries" in out
    found = read(capsys, "stats", run)
    assert (found["entries/ready"], found["rewards"]["expert"]["counts"]) == (2, [1])


def test_what_one_run_exports_another_imports_with_tags(capsys, run, tmp_path):
    out = triune(capsys, "buffer", "export", run, "good.parquet", "--where", "reward > 0.3", "--state", "spent")[1]
    assert "2 experiences of 1 groups written to good.parquet" in out
    make_store(tmp_path / "other", "other")
    found = read(capsys, "import", "other/buffer.sqlite", "good.parquet", "--into", "past", "--tag", "first")
    assert (found["num_new"], found["num_refused"]) == (1, 0)
    assert [r["entry"] for r in read(capsys, "query", "other/buffer.sqlite", "tags = first AND buffer = past")] == [
        "first/train/t0/0"
    ]


def test_import_reads_text_with_the_runs_tokenizer_refuses_bad_rows_and_says_so_with_its_exit_code(capsys, run):
    chat = {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}
    talk = {"conversations": [{"from": "human", "value": "1+2="}, {"from": "gpt", "value": "3"}]}
    pair = {"prompt": "1+3=", "chosen": "4", "rejected": "5"}
    bad = {"messages": [{"role": "user", "content": "1+1="}]}
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, (chat, talk, pair, bad))))
    code, out, _ = triune(capsys, "buffer", "import", run, "rows.jsonl", "--into", "taught")
    assert code == 1
    assert "4 entries in rows.jsonl: 3 new in buffer taught, 0 duplicate, 0 filtered out, 1 refused" in out
    assert "1 x `messages` do not end with the assistant's" in out
    assert "4 of 4 new sequences have no behaviour log-probs" in out
    assert json.loads(Path("rows.jsonl.rejects.jsonl").read_text())["row"] == 4
    rows = read(capsys, "query", run, "buffer = taught")
    shown = read(capsys, "show", run, rows[-1]["entry"])
    assert shown["records"][0]["messages"][-1]["content"] == "2"
    code, out, _ = triune(
        capsys, "buffer", "import", run, "rows.jsonl", "--into", "taught", "--where", "num_tokens > 0"
    )
    assert "0 new in buffer taught, 3 duplicate" in out


def test_text_for_a_bare_store_needs_the_name_of_a_model(capsys, run):
    chat = {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}
    Path("rows.jsonl").write_text(json.dumps(chat))
    words = ("buffer", "import", "runs/first/buffer.sqlite", "rows.jsonl", "--into", "taught")
    code, _, err = triune(capsys, *words)
    assert code == 2
    assert "a store has no model of its own" in err
    assert triune(capsys, *words, "--model", "triune/nano")[0] == 0


def test_gc_looks_first_and_deletes_only_when_told(capsys, run):
    code, _, err = triune(capsys, "buffer", "gc", run, "--user", "ann")
    assert code == 2
    assert "look with --dry-run, then delete with --yes" in err
    code, out, _ = triune(capsys, "buffer", "gc", run, "--user", "ann", "--dry-run")
    assert (code, out.splitlines()[0]) == (0, "2 entries would be deleted (1 spent, 1 ready, 2 policy)")
    assert len(read(capsys, "query", run, "data.user_id = ann")) == 2
    code, out, _ = triune(capsys, "buffer", "gc", run, "--user", "ann", "--where", "state = ready", "--yes")
    assert (code, out.splitlines()[0]) == (0, "1 entries deleted (1 ready, 1 policy)")
    assert [row["state"] for row in read(capsys, "query", run, "reason = redacted")] == ["evicted"]
    assert triune(capsys, "buffer", "show", run, "first/train/t2/0")[0] == 0
    assert "nothing says what to delete" in triune(capsys, "buffer", "gc", run, "--yes")[2]
    assert "policy or expert" in triune(capsys, "buffer", "gc", run, "--source", "polcy", "--yes")[2]


def test_segments_are_counted_verified_and_freed(capsys, run):
    make_store(Path("large"), "large", segments=SegmentSettings(min_bytes=0))
    file = "large/buffer.sqlite"
    assert "1 segments, 0 bytes unreferenced" in triune(capsys, "buffer", "verify", file)[1]
    assert read(capsys, "stats", file)["segments/num_blobs"] == 7
    connection = sqlite3.connect(file)
    connection.execute("DELETE FROM segment_blobs WHERE entry = 1")
    connection.execute("DELETE FROM revisions WHERE entry = 1")
    connection.commit()
    connection.close()
    assert "--segments" in triune(capsys, "buffer", "gc", file, "--yes")[2]
    code, out, _ = triune(capsys, "buffer", "gc", file, "--segments", "--dry-run")
    assert (code, "of 1 segments would go (0 removed, 0 written anew, 1 overwritten in part)" in out) == (0, True)
    code, out, _ = triune(capsys, "buffer", "gc", file, "--segments", "--yes")
    assert (code, "of 1 segments are gone" in out) == (0, True)
    out = triune(capsys, "buffer", "gc", file, "--segments", "--yes")[1]
    assert out == "every byte of 1 segments is referred to or overwritten\n"
    [path] = Path("large").rglob("*.seg")
    path.unlink()
    code, out, _ = triune(capsys, "buffer", "verify", file)
    assert (code, f"segments: {path.name} is missing" in out) == (1, True)
    code, _, err = triune(capsys, "buffer", "show", file, "large/train/t2/0")
    assert (code, "it cannot be read" in err) == (1, True)


def test_gc_leaves_with_exit_code_1_while_a_reader_keeps_old_bytes_on_the_disk(capsys, run):
    Path("first.yaml").write_text(RUN + "buffer: {store: {use: sqlite, busy_timeout_s: 0.05}}\n")
    config = load_config("first.yaml")
    save_resolved(config, config.run_dir)
    reader = sqlite3.connect("runs/first/buffer.sqlite", isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM runs").fetchone()
    code, out, _ = triune(capsys, "buffer", "gc", run, "--user", "ann", "--yes")
    assert code == 1
    assert "their bytes are still in runs/first/buffer.sqlite-wal: somebody reads the store as it was; try again" in out
    reader.close()
    code, out, _ = triune(capsys, "buffer", "gc", run, "--user", "ann", "--yes")
    assert (code, out) == (0, "0 entries deleted\n")


def test_verify_is_silent_on_a_sound_store_and_names_damage_with_exit_code_1(capsys, run):
    code, out, _ = triune(capsys, "buffer", "verify", run)
    assert (code, out.splitlines()[-1]) == (0, "everything is as it should be")
    file = Path("runs/first/buffer.sqlite")
    connection = sqlite3.connect(file)
    connection.execute("UPDATE revisions SET blob = x'5452' WHERE entry = 3 AND revision = 0")
    connection.commit()
    connection.close()
    code, out, err = triune(capsys, "buffer", "verify", run)
    assert (code, err) == (1, "")
    assert "blobs first/train/t2/0: revision 0: " in out
    assert "do: take it out with `triune buffer gc" in out
    code, _, _ = triune(capsys, "buffer", "gc", run, "--where", "entry = 'first/train/t2/0'", "--yes")
    assert code == 0
    assert triune(capsys, "buffer", "verify", run)[0] == 0
    file.write_bytes(file.read_bytes()[:10000])
    for suffix in ("-wal", "-shm"):
        file.with_name(file.name + suffix).unlink(missing_ok=True)
    code, out, err = triune(capsys, "buffer", "verify", run, "--json")
    assert (code, err) == (1, "")
    assert "its end is missing" in json.loads(out)["findings"][0]["found"]
