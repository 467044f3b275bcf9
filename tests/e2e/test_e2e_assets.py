"""What one run or tool made, another run trains on: with ratios where log-probs are known, else only by imitation."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest

import triune
import triune.buffer
from triune.buffer.query_parser import parse_filter
from triune.buffer.redaction import delete
from triune.cli import boundary

CHATS = [
    {"messages": [{"role": "user", "content": f"{n}+1="}, {"role": "assistant", "content": f"{n + 1}"}]}
    for n in range(4)
]
NEXT = """
name: {name}
tasks: {{use: arithmetic}}
algorithm: {{use: {algorithm}, sampling: {{use: fifo, buffer: {buffer}}}}}
buffer: {{store: {{use: sqlite, path: past.sqlite}}}}
trainer: {{steps: {steps}, {unit}: 4}}
sync: {{channel: files}}
"""
TALKS = [
    {"conversations": [{"from": "human", "value": f"{n}+2="}, {"from": "gpt", "value": f"{n + 2}"}]} for n in range(2)
]


def varied(task: Any, answer: str) -> float:
    """A reward that differs within most groups."""
    return float(zlib.crc32(answer.encode()) % 2)


def triune_ends_well(*words: str) -> None:
    assert boundary.run(list(words)) == 0


def metrics(name: str) -> list[dict[str, Any]]:
    """The trainer's row of every step."""
    rows = [json.loads(line) for line in Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def next_run(name: str, algorithm: str = "grpo", buffer: str = "past", steps: int = 1) -> str:
    """A run file; its name."""
    unit = {"sft": "sequences_per_step", "dpo": "pairs_per_step"}.get(algorithm, "tasks_per_step")
    file = Path(f"{name}.yaml")
    file.write_text(NEXT.format(name=name, algorithm=algorithm, buffer=buffer, steps=steps, unit=unit))
    return str(file)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a short run on the model that ships experienced: 8 groups, half of them sampled by changed weights."""
    folder = tmp_path_factory.mktemp("first")
    config = {
        "name": "first", "runs_dir": str(folder), "seed": 1, "tasks": {"use": "arithmetic"},
        "algorithm": {"use": "grpo", "group_size": 2}, "explorer": {"max_tokens": 6},
        "trainer": {"steps": 2, "tasks_per_step": 4, "learning_rate": 3e-4},
        "monitor": {"sinks": ["jsonl"], "curve": False},
    }  # fmt: skip
    assert triune.run(config, reward=varied)["steps"] == 2
    with triune.buffer.open(folder / "first") as buffer:
        assert buffer.export(folder / "first.parquet", "state = spent").num_entries == 8
    return folder / "first.parquet"


def test_a_later_run_corrects_for_the_weights_that_sampled_what_it_imports(
    first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    triune_ends_well("buffer", "import", "past.sqlite", str(first), "--into", "past", "--tag", "first")
    triune_ends_well("train", next_run("next", steps=2))
    rows = metrics("next")
    for row in rows:
        assert (row["num_imported"], row["num_sequences"], row["tokens_without_behaviour"]) == (4, 8, 0)
        assert row["staleness_max"] == 0, "the first run's versions say nothing of this one"
    same, other = (abs(row["ratio_mean"] - 1) for row in rows)
    assert same < 1e-3, "the same weights sampled the first four"
    assert other > 10 * same, "the others were sampled by weights that had moved, these have moved elsewhere"
    with triune.buffer.open("past.sqlite") as buffer:
        assert {use.consumer for use in buffer.step(2, run="next")} == {"next"}
        assert {row.uses for row in buffer.entries("tags = first")} == {1}


def test_talks_and_exported_experience_in_one_buffer_share_a_step_and_only_the_talks_are_masked(
    first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("talks.jsonl").write_text("\n".join(map(json.dumps, TALKS)))
    triune_ends_well("buffer", "import", "past.sqlite", "talks.jsonl", "--into", "past", "--model", "triune/nano")
    triune_ends_well("buffer", "import", "past.sqlite", str(first), "--into", "past")
    triune_ends_well("train", next_run("next"))
    [row] = metrics("next")
    with triune.buffer.open("past.sqlite") as buffer:
        facts = [fact for use in buffer.step(1, run="next") for fact in buffer.why(use.entry).records]
    assert [fact.source for fact in facts] == ["expert"] * 2 + ["policy"] * 4
    assert row["num_imported"] == 4
    assert row["tokens_without_behaviour"] == sum(fact.num_unknown for fact in facts) > 0
    assert row["num_action_tokens"] > row["tokens_without_behaviour"]


def test_a_trainer_without_an_explorer_uses_up_what_was_imported_into_its_own_buffer_and_ends(
    first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("triune.launcher.alone.EXPLORER_S", 0.2)
    triune_ends_well("buffer", "import", "past.sqlite", str(first), "--into", "main", "--where", "task_key != 'x'")
    with triune.buffer.open("past.sqlite") as buffer:
        delete(buffer.store, parse_filter(f"entry = '{next(iter(buffer)).entry}'"), by="test", is_dry=False)
    triune_ends_well("train", next_run("alone", buffer="main", steps=9))
    assert [row["num_imported"] for row in metrics("alone")] == [4, 3]
    summary = json.loads(Path("runs/alone/summary.json").read_text())
    assert (summary["status"], summary["exit_reason"]) == ("finished", "the data ended after 2 steps")
    assert "no explorer came" in Path("runs/alone/metrics.jsonl").read_text()


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_imported_chats_teach_by_imitation_and_are_masked_and_counted_in_a_ratio_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
):
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text("\n".join(map(json.dumps, CHATS)))
    triune_ends_well("buffer", "import", "past.sqlite", "chats.jsonl", "--into", "chats", "--model", "triune/nano")
    triune_ends_well("train", next_run("next", algorithm, "chats"))
    with triune.buffer.open("past.sqlite") as buffer:
        used = buffer.step(1, run="next")
        assert len(used) == 4
        sampled = sum(record.num_actions for use in used for record in buffer.why(use.entry).records)
        assert buffer.verify().findings == ()
    [found] = metrics("next")
    assert found["num_sequences"] == found["num_imported"] == 4
    if algorithm == "sft":
        assert found["loss"] > 0
    else:
        assert (found["tokens_without_behaviour"], found["loss"]) == (sampled, 0)


def test_imported_pairs_teach_preferences_without_any_behaviour_log_prob(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    pairs = [{"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": f"{n}"} for n in range(4)]
    Path("pairs.json").write_text(json.dumps(pairs))
    triune_ends_well("buffer", "import", "past.sqlite", "pairs.json", "--into", "pairs", "--model", "triune/nano")
    triune_ends_well("train", next_run("next", "dpo", "pairs"))
    [row] = metrics("next")
    assert (row["num_imported"], row["num_sequences"]) == (4, 8)
    assert row["loss"] > 0
    assert row["grad_norm"] > 0
