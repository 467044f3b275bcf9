"""What one run or tool made, another run trains on: with ratios where log-probs are known, else only by imitation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import triune.buffer
from triune.cli import boundary

CHATS = [
    {"messages": [{"role": "user", "content": f"{n}+1="}, {"role": "assistant", "content": f"{n + 1}"}]}
    for n in range(4)
]
NEXT = """
name: {name}
tasks: {{use: arithmetic}}
algorithm: {{use: {algorithm}, sampling: {{use: fifo, buffer: chats}}}}
buffer: {{store: {{use: sqlite, path: past.sqlite}}}}
trainer: {{steps: 1, {unit}: 4}}
"""


def triune_ends_well(*words: str) -> None:
    assert boundary.run(list(words)) == 0


def metrics(name: str) -> dict[str, Any]:
    rows = [json.loads(line) for line in Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()]
    return next(row for row in rows if "loss" in row)


@pytest.mark.parametrize(("algorithm", "unit"), [("sft", "sequences_per_step"), ("grpo", "tasks_per_step")])
def test_imported_chats_teach_by_imitation_and_are_masked_and_counted_in_a_ratio_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, unit: str
):
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text("\n".join(map(json.dumps, CHATS)))
    Path("next.yaml").write_text(NEXT.format(name="next", algorithm=algorithm, unit=unit))
    triune_ends_well("buffer", "import", "past.sqlite", "chats.jsonl", "--into", "chats", "--model", "triune/nano")
    triune_ends_well("train", "next.yaml")
    with triune.buffer.open("past.sqlite") as buffer:
        used = buffer.step(1, run="next")
        assert len(used) == 4
        sampled = sum(record.num_actions for use in used for record in buffer.why(use.entry).records)
        assert buffer.verify().findings == ()
    found = metrics("next")
    assert found["num_sequences"] == 4
    if algorithm == "sft":
        assert found["loss"] > 0
    else:
        assert (found["tokens_without_behaviour"], found["loss"]) == (sampled, 0)
