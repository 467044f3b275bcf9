"""What everything around the model costs: `make bench-overhead`.

Samples/s of `triune.run` (durable buffer, all metrics, our own workflow through the in-process handle) against a bare
hand-written loop with the same model, tasks, batch, lengths and arithmetic (float32). Rewards are coin flips and the
learning rate is 0, so both train the same number of rows in every step. Each side runs in a process of its own, in
turn.

    TRIUNE_BENCH_MODELS=nano TRIUNE_BENCH_STEPS=30 TRIUNE_BENCH_PAIRS=1 make bench-overhead

The ratio is Triune's samples/s over the bare loop's, median over pairs. Processor seconds are shown beside it: they
tell the same where something else disturbs the clock.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.limits import Machine, check_baseline, measure
from benchmarks.pairs import alternate, median, module_side, names, samples_per_s, setting

ROOT = Path(__file__).resolve().parents[1]
ALARMS = ("entropy_collapse", "logprob_gap", "kl_growth", "length_drift", "reward_hacking")
TOP_STAGES = {
    "trainer/lease": "trainer waits for a batch: exploring",
    "trainer/prepare": "rows into tensors",
    "trainer/update": "forward, backward, optimiser",
    "trainer/publish": "weights handed over",
    "trainer/save": "checkpoint, acknowledge",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model.

    Attributes:
        key: Of the ratio in the last line.
        parameters: For the share of the hardware limit.
        prompt: Tokens of a prompt, about; likewise.
        goal: Smallest ratio we accept.
        recorded: Samples/s of the bare loop on the reference machine; None where none was recorded.
    """

    key: str
    parameters: float
    prompt: int
    tasks: int
    max_tokens: int
    largest: int
    steps: int
    goal: float
    recorded: float | None = None
    group: int = 8


CASES = {
    "nano": Case(
        key="ratio",
        parameters=1.05e6,
        prompt=9,
        tasks=32,
        max_tokens=5,
        largest=99,
        steps=150,
        goal=0.9,
        recorded=2020.0,
    ),
    "0_3m": Case(
        key="ratio_0_3m",
        parameters=0.33e6,
        prompt=9,
        tasks=32,
        max_tokens=5,
        largest=30,
        steps=150,
        goal=0.8,
        recorded=4800.0,
    ),
    "smollm": Case(
        key="ratio_smollm", parameters=134.5e6, prompt=30, tasks=8, max_tokens=16, largest=9, steps=8, goal=0.95
    ),
}


def main() -> None:
    """Measure every model and print the tables."""
    machine = measure()
    print(machine.describe())
    pairs = setting("PAIRS", 3)
    found: dict[str, Any] = {"pairs": pairs, "machine": machine.to_json()}
    with tempfile.TemporaryDirectory() as scratch:
        for name in names("MODELS", list(CASES)):
            case = CASES[name]
            found[name] = measure_case(name, case, folder(name, Path(scratch)), pairs, machine)
            found[case.key] = found[name].pop("ratio")
    print(json.dumps(found))


def folder(name: str, scratch: Path) -> str:
    """Where the model of a case is; the smallest one is made, with random weights."""
    if name == "nano":
        return "triune/nano"
    if name == "smollm":
        from benchmarks.smollm import fetch

        return str(fetch())
    target = scratch / "nano_0_3m"
    command = [sys.executable, str(ROOT / "recipes/nano/make_folder.py"), str(target), "--size", "0.3M"]
    subprocess.run(command, check=True, capture_output=True)
    return str(target)


def measure_case(name: str, case: Case, model: str, pairs: int, machine: Machine) -> dict[str, Any]:
    """ABAB on one model; prints its tables."""
    steps = setting("STEPS", case.steps) if name != "smollm" else setting("SMOLLM_STEPS", case.steps)
    common = {
        "model": model,
        "is_nano": name != "smollm",
        "largest": case.largest,
        "tasks": case.tasks,
        "group": case.group,
        "max_tokens": case.max_tokens,
        "steps": steps,
        "alarms": ALARMS,
    }
    samples = case.tasks * case.group
    bare, ours = alternate(
        pairs,
        lambda: module_side("benchmarks.overhead_side", {**common, "side": "bare"}),
        lambda: module_side("benchmarks.overhead_side", {**common, "side": "triune"}),
    )
    theirs_s, ours_s = ([samples_per_s(report, samples) for report in side] for side in (bare, ours))
    ratio = median([mine / other for mine, other in zip(ours_s, theirs_s, strict=True)])
    cpu = median([_cpu(other) / _cpu(mine) for mine, other in zip(ours, bare, strict=True)])
    share = None if case.recorded is None else check_baseline(f"bare {name}", max(theirs_s), case.recorded, machine)
    of_limit = max(theirs_s) * _flops_per_sample(case) / machine.fp32_medium_gflops / 1e9
    print(f"\n{name}: {case.tasks} tasks x {case.group}, {steps} steps, {pairs} pairs")
    print(f"  bare loop  {median(theirs_s):9.1f} samples/s   {of_limit:5.1%} of the machine's fp32 matmul limit")
    print(f"  Triune     {median(ours_s):9.1f} samples/s   {median([r['memory_gb'] for r in ours]):.2f} GB peak")
    print(f"  ratio      {ratio:9.3f}  (goal {case.goal}; by processor seconds {cpu:.3f})")
    stages = _microseconds(ours, samples)
    _print_stages(stages, _microseconds(bare, samples))
    return {
        "ratio": round(ratio, 4),
        "ratio_cpu": round(cpu, 4),
        "bare_samples_per_s": round(median(theirs_s), 1),
        "samples_per_s": round(median(ours_s), 1),
        "bare_share_of_recorded": None if share is None else round(share, 3),
        "bare_share_of_limit": round(of_limit, 4),
        "microseconds_per_rollout": {key: round(value, 1) for key, value in stages.items()},
    }


def _cpu(report: dict[str, Any]) -> float:
    return sum(report["cpu_s"]) / len(report["cpu_s"])


def _flops_per_sample(case: Case) -> float:
    trained = case.prompt + case.max_tokens
    sampled = case.prompt / case.group + case.max_tokens
    return case.parameters * (6 * trained + 2 * sampled)


def _microseconds(reports: list[dict[str, Any]], samples: int) -> dict[str, float]:
    """Per rollout: the whole step, and every stage; medians over the runs."""
    whole = {"step": median([sum(r["wall_s"]) / len(r["wall_s"]) for r in reports])}
    stages = {key: median([r["stages"].get(key, 0.0) for r in reports]) for key in reports[0]["stages"]}
    return {key: value / samples * 1e6 for key, value in {**whole, **stages}.items()}


def _print_stages(ours: dict[str, float], bare: dict[str, float]) -> None:
    print(f"  {'microseconds per rollout':40}{'Triune':>9}")
    print(f"    {'whole step':38}{ours['step']:9.1f}")
    top = sum(ours.get(name, 0.0) for name in TOP_STAGES)
    for name, meaning in TOP_STAGES.items():
        print(_line(name, meaning, ours))
    print(f"    {'rest of the trainer loop':38}{ours['step'] - top:9.1f}")
    for name in sorted(ours):
        if name.startswith("explorer/"):
            print(_line(name, "inside trainer/lease, may overlap", ours))
    print(
        f"    bare loop: step {bare['step']:.1f}"
        f" = generate {bare['bare/generate']:.1f} + update {bare['bare/update']:.1f}"
    )


def _line(name: str, meaning: str, stages: dict[str, float]) -> str:
    return f"    {name:38}{stages.get(name, 0.0):9.1f}   {meaning}"


if __name__ == "__main__":
    main()
