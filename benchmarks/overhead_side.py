"""One side of `make bench-overhead` in a process of its own.

    python -m benchmarks.overhead_side '{"side": "bare", …}'

The last line is one JSON object: wall-clock and processor seconds of every step after the warm-up, rewards, memory and,
for Triune, the seconds by stage from `metrics.jsonl`.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.steps_clock import FILE, now, peak_memory_gb

WARM_UP = 3
"""Steps at the start that do not count, on both sides."""

SYSTEM = "Answer with the number only."


def bare(case: dict[str, Any]) -> dict[str, Any]:
    """The hand-written loop."""
    from benchmarks.baselines import bare_grpo, load_bare, nano_sums
    from triune.models import ChatTokenizer, resolve_model

    folder = resolve_model(case["model"]).location
    tokenizer = ChatTokenizer.load(folder)
    source = nano_sums(seed=1, largest=case["largest"])
    tasks = source if case["is_nano"] else _templated(source, tokenizer)
    marks: list[tuple[float, float]] = []
    model = load_bare(folder)
    gc.collect()
    gc.freeze()
    run = bare_grpo(
        model,
        _marked(tasks, marks, case["tasks"]),
        steps=case["steps"],
        tasks_per_step=case["tasks"],
        group_size=case["group"],
        max_new=case["max_tokens"],
        learning_rate=0.0,
        eos=int(tokenizer.hf.eos_token_id),
        pad=int(tokenizer.hf.pad_token_id),
        random_rewards=True,
    )
    marks.append(now())
    kept = run.seconds[WARM_UP:]
    stages = {"generate": sum(run.generating[WARM_UP:]), "update": sum(kept) - sum(run.generating[WARM_UP:])}
    return {**_report(marks[1:]), "stages": {f"bare/{name}": value / len(kept) for name, value in stages.items()}}


def _templated(source: Iterator[tuple[Any, Any]], tokenizer: Any) -> Iterator[tuple[list[int], list[int]]]:
    """The same sums as a conversation in the model's own chat template."""
    for prompt, _ in source:
        question = bytes(prompt[2:-2]).decode()
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        yield tokenizer.prompt(messages).ids.tolist(), []


def _marked(tasks: Iterator[Any], marks: list[tuple[float, float]], every: int) -> Iterator[Any]:
    """The tasks, noting the time whenever a step asks for its first."""
    for number, task in enumerate(tasks):
        if number % every == 0:
            marks.append(now())
        yield task


def framework(case: dict[str, Any]) -> dict[str, Any]:
    """Triune, as a user runs it: durable buffer, all default metrics, the workflow `single_turn`."""
    import triune

    with tempfile.TemporaryDirectory() as runs:
        config = {
            "name": "overhead",
            "runs_dir": runs,
            "model": {"path": case["model"]},
            "tasks": {
                "use": "arithmetic",
                "max": case["largest"],
                "reward": "benchmarks.random_reward:coin",
                "workflow": {"use": "single_turn", **({} if case["is_nano"] else {"system": SYSTEM})},
            },
            "algorithm": {"use": "grpo", "group_size": case["group"]},
            "explorer": {
                "max_tokens": case["max_tokens"],
                "runner": "inline",
                "engine": {"use": "embedded", "dtype": "float32"},
            },
            "trainer": {
                "steps": case["steps"],
                "tasks_per_step": case["tasks"],
                "learning_rate": 0.0,
                "precision": "float32",
            },
            "monitor": {
                "sinks": ["console", "jsonl", {"use": "benchmarks.steps_clock:StepsClock"}],
                "heartbeat_s": 3600,
                "alarms": [{"use": name} for name in case["alarms"]],
            },
        }
        triune.run(config)
        folder = Path(runs) / "overhead"
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        marks = json.loads((folder / FILE).read_text())
    return {**_report(marks), "stages": _stages(rows)}


def _stages(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Mean seconds per step of every `time/…` key, as `role/stage`."""
    kept = [row for row in rows if row["step"] > WARM_UP and row["role"] in ("explorer", "trainer")]
    steps = {row["step"] for row in kept if row["role"] == "trainer"}
    sums: dict[str, float] = {}
    for row in kept:
        for name, value in row.items():
            if name.startswith("time/") and row["step"] in steps:
                key = f"{row['role']}/{name[5:].removesuffix('_s')}"
                sums[key] = sums.get(key, 0.0) + value
    return {name: value / len(steps) for name, value in sums.items()}


def _report(marks: Sequence[Sequence[float]]) -> dict[str, Any]:
    kept = list(marks)[WARM_UP - 1 :]
    return {
        "wall_s": [later[0] - earlier[0] for earlier, later in pairwise(kept)],
        "cpu_s": [later[1] - earlier[1] for earlier, later in pairwise(kept)],
        "memory_gb": peak_memory_gb(),
    }


if __name__ == "__main__":
    case = json.loads(sys.argv[1])
    print(json.dumps(bare(case) if case["side"] == "bare" else framework(case)))
