"""Triune's half of `make bench-trl`: `triune.run` on the workload, in a process of its own.

python -m benchmarks.trl_our_side '{"model": "…", "steps": 6, "report": "side.json", …}'
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.steps_clock import FILE, peak_memory_gb


def run_file(workload: dict[str, Any], runs_dir: Path) -> dict[str, Any]:
    """The workload as a run file: GRPO without KL, one update a step, no group left out."""
    return {
        "name": "against_trl",
        "seed": workload["seed"],
        "runs_dir": str(runs_dir),
        "model": {"path": workload["model"], "dtype": workload.get("dtype", "auto")},
        "tasks": {
            "use": "reasoning_gym",
            "generator": workload["generator"],
            "options": workload["generator_options"],
            "workflow": {"use": "single_turn", "system": workload["system"]},
            "reward": "last_number",
        },
        "algorithm": {
            "use": "grpo",
            "group_size": workload["group_size"],
            "policy_loss": {"clip_low": 0.2, "clip_high": 0.28},
        },
        "explorer": {"max_tokens": workload["max_tokens"]},
        "trainer": {
            "steps": workload["steps"],
            "tasks_per_step": workload["tasks_per_step"],
            "learning_rate": workload["learning_rate"],
            "betas": [0.9, 0.95],
            "tokens_per_micro_batch": 1024,
        },
        "monitor": {"sinks": ["console", "jsonl", {"use": "benchmarks.steps_clock:StepsClock"}]},
    }


def main() -> None:
    """Run, then write what the metrics say about every step but the first."""
    import triune

    workload = json.loads(sys.argv[1])
    report = Path(workload["report"])
    triune.run(run_file(workload, report.parent))
    folder = report.parent / "against_trl"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    marks = json.loads((folder / FILE).read_text())
    trained = [row for row in rows if row["role"] == "trainer" and row["step"] > 0]
    explored = [row for row in rows if row["role"] == "explorer" and "reward" in row]
    seconds: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith("time/") and row["step"] > 1:
                seconds[f"{row['role']}/{name[5:-2]}"] = seconds.get(f"{row['role']}/{name[5:-2]}", 0.0) + value
    found = {
        "wall_s": [later[0] - earlier[0] for earlier, later in pairwise(marks)],
        "cpu_s": [later[1] - earlier[1] for earlier, later in pairwise(marks)],
        "memory_gb": peak_memory_gb(),
        "rewards": [row["reward"] for row in explored],
        "mean_length": [row["num_action_tokens"] / row["num_sequences"] for row in trained],
        "num_sequences": [row["num_sequences"] for row in trained],
        "logprob_gap": [row["logprob_gap"] for row in trained],
        "seconds": {name: value / max(1, len(trained) - 1) for name, value in seconds.items()},
    }
    report.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
