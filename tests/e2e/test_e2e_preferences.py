"""Learning from files on disk: real runs of the shipped model that end with the data."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import triune
from triune.buffer import BufferSettings, open_buffer
from triune.cli.boundary import run as command_line
from triune.errors import RunFailed, TaskError
from triune.testing.run_files import save_run_file
from triune.testing.zoo_runs import zoo_run


def config(folder: Path, rows: list[dict[str, Any]], *, name: str = "run", **sections: Any) -> dict[str, Any]:
    """A run of the shipped model over rows in a file, once."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trainer = {"learning_rate": 2e-4, "steps": 99, **sections.pop("trainer", {})}
    return {
        "name": name,
        "runs_dir": str(folder / "runs"),
        "tasks": {"use": "jsonl", "path": str(path), "epochs": 1, "order": "sequential"},
        "trainer": trainer,
        "monitor": {"sinks": ["jsonl"], "curve": False},
        **sections,
    }


def train(folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    """`triune train` on it, as from a shell; the summary."""
    assert command_line(["train", str(save_run_file(given, folder / f"{given['name']}.yaml"))]) == 0
    return json.loads((folder / "runs" / given["name"] / "summary.json").read_text())


def steps(folder: Path, name: str, metric: str) -> list[float]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [row[metric] for row in map(json.loads, lines) if row["role"] == "trainer" and metric in row]


def sums(num: int, *, seed: int = 0) -> list[tuple[str, str, str]]:
    """Questions with the right answer and one that is off by a little."""
    chance = np.random.default_rng(seed)
    numbers, off = chance.integers(10, 100, (num, 2)), chance.integers(1, 5, num)
    return [(f"{a}+{b}=", str(a + b), str(a + b + d)) for (a, b), d in zip(numbers.tolist(), off.tolist(), strict=True)]


def pairs(num: int) -> list[dict[str, Any]]:
    return [{"prompt": q, "chosen": right, "rejected": wrong} for q, right, wrong in sums(num)]


@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo", "orpo"])
def test_preferences_in_a_file_raise_the_margin_and_training_ends_with_the_data(tmp_path, name):
    given = config(tmp_path, pairs(76), name=name, algorithm=name, trainer={"pairs_per_step": 8})
    summary = train(tmp_path, given)
    assert (summary["status"], summary["exit_reason"]) == ("finished", "the data ended after 10 steps")
    assert steps(tmp_path, name, "num_sequences") == [16] * 9 + [8]
    margins = steps(tmp_path, name, "reward_margin")
    assert np.mean(margins[-3:]) > np.mean(margins[:3])
    if name in ("dpo", "ipo"):
        assert margins[0] == pytest.approx(0, abs=1e-4), "the reference is the model the run begins with"


def test_labelled_answers_move_the_desirable_ones_up_and_the_others_down(tmp_path):
    rows = [
        {"prompt": question, "answer": answer, "label": answer is right}
        for question, right, wrong in sums(80)
        for answer in (right, wrong)
    ]
    train(tmp_path, config(tmp_path, rows, algorithm="kto", trainer={"sequences_per_step": 16}))
    gap = np.subtract(*(steps(tmp_path, "run", f"{name}_reward") for name in ("chosen", "rejected")))
    assert abs(gap[0]) < 1e-4
    assert gap[-3:].mean() > 0


def test_answers_and_texts_in_a_file_lower_the_loss(tmp_path):
    answers = [{"question": question, "answer": f"It is {right}."} for question, right, _ in sums(48)]
    train(tmp_path, config(tmp_path, answers, name="sft", algorithm="sft", trainer={"sequences_per_step": 8}))
    texts = [{"text": f"{question}{right}. " * 20} for question, right, _ in sums(48)]
    algorithm = {"use": "cpt", "max_tokens": 64}
    train(tmp_path, config(tmp_path, texts, name="cpt", algorithm=algorithm, trainer={"sequences_per_step": 8}))
    for name in ("sft", "cpt"):
        losses = steps(tmp_path, name, "loss")
        assert len(losses) == 6
        assert losses[-1] < losses[0]
    assert min(steps(tmp_path, "cpt", "num_sequences")) > 8, "long texts are several sequences"


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_case_42_a_resumed_run_has_the_reference_and_the_state_it_began_with(tmp_path, failpoints, name):
    rows = pairs(20) if name == "dpo" else [{**row, "answer": row["chosen"], "label": True} for row in pairs(20)]
    unit = "pairs_per_step" if name == "dpo" else "sequences_per_step"
    sections = {"algorithm": name, "deterministic": True, "trainer": {unit: 4, "save_every": 2}}
    train(tmp_path, config(tmp_path, rows, name="whole", **sections))
    failpoints("trainer.checkpoint.after_rename:2:raise")
    with pytest.raises(RunFailed, match="failpoint"):
        triune.run(config(tmp_path, rows, name="cut", **sections))
    failpoints("")
    assert triune.run(config(tmp_path, rows, name="cut", **sections), resume=True)["steps"] == 5
    one, other = (tmp_path / "runs" / name / "export" / "model.safetensors" for name in ("whole", "cut"))
    assert one.read_bytes() == other.read_bytes()
    if name == "kto":
        assert steps(tmp_path, "cut", "reference_point")[-1] > 0


def test_a_row_without_what_is_read_ends_the_run_before_the_model_is_loaded(tmp_path):
    rows = [{"prompt": "a", "chosen": "b", "rejected": None}]
    with pytest.raises(TaskError, match="the row has no 'rejected'"):
        triune.run(config(tmp_path, rows, algorithm="dpo"))


def test_training_alone_on_an_imported_buffer_takes_the_short_last_batch_and_ends(tmp_path):
    stores = [{"store": {"use": "sqlite", "path": str(tmp_path / f"{name}.sqlite")}} for name in ("first", "again")]
    trainer = {"pairs_per_step": 11}
    train(tmp_path, config(tmp_path, pairs(11), name="first", algorithm="dpo", trainer=trainer, buffer=stores[0]))

    async def carry_over() -> int:
        first, again = (open_buffer(BufferSettings.model_validate(store), tmp_path) for store in stores)
        await first.export_jsonl(tmp_path / "past.jsonl")
        number = await again.import_jsonl(tmp_path / "past.jsonl", buffer="past")
        await first.close()
        await again.close()
        return number

    assert asyncio.run(carry_over()) == 11
    algorithm = {"use": "dpo", "sampling": {"use": "fifo", "buffer": "past"}}
    trainer = {"pairs_per_step": 4}
    given = config(tmp_path, pairs(1), name="again", algorithm=algorithm, trainer=trainer, buffer=stores[1])
    summary = train(tmp_path, given)
    assert (summary["status"], summary["exit_reason"]) == ("finished", "the data ended after 3 steps")
    assert steps(tmp_path, "again", "num_sequences") == [8, 8, 6]


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "gain"), [("sft", 0.3), ("dpo", 0.1)])
def test_held_out_accuracy_rises_from_files_alone(tmp_path, algorithm, gain):
    given = zoo_run(algorithm, tmp_path, steps=40)
    train(tmp_path, given)
    rows = map(json.loads, (tmp_path / "runs" / given["name"] / "eval.jsonl").read_text().splitlines())
    accuracy = [row["mean@1"] for row in rows if row["kind"] == "set"]
    assert accuracy[-1] > accuracy[0] + gain, "400 held-out sums, sampled"
