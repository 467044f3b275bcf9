"""The same GRPO workload through TRL's `GRPOTrainer` and through Triune, on this CPU: `make bench-trl`.

SmolLM2-135M, all weights trained from float32 masters; reasoning-gym `chain_sum` of two one-digit terms, 8 tasks x 8
answers a step, reward = the last number is the answer, clip 0.2/0.28, no KL, no group left out. Both sides sample 16
tokens for every answer and train on all of them: they get a copy of the model whose end token is one that is never
sampled. Both compute in bfloat16 where this CPU does so in hardware, else in float32. The first step of each side does
not count; processes start anew for every run, in turn.

    TRIUNE_BENCH_STEPS=3 TRIUNE_BENCH_TASKS=2 TRIUNE_BENCH_PAIRS=1 make bench-trl

TRL's settings are the fastest found for it here, tried one by one: no activation checkpointing (its default recomputes
every forward), 16 rows at a time (as fast as 64 at once, with less than half the memory), eager attention (on short
rows faster than the fused kernel), no reference model.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.limits import check_baseline, measure
from benchmarks.pairs import alternate, median, run_side, samples_per_s, setting
from benchmarks.smollm import fetch
from triune.models import has_fast_bfloat16

ROOT = Path(__file__).resolve().parents[1]
TRL_PYTHON = ROOT / os.environ.get("TRIUNE_TRL_VENV", ".venv-trl") / "bin" / "python"
RECORDED = 3.9
"""Samples/s of TRL on the reference machine (3.9 to 4.15), 8 tasks x 8, bf16."""

NEVER_SAMPLED = ("<file_sep>", 5)
"""A token for repositories of code: it ends no answer to a sum."""

WORKLOAD: dict[str, Any] = {
    "seed": 1,
    "group_size": 8,
    "max_tokens": 16,
    "learning_rate": 1e-5,
    "system": "Answer with the number only.",
    "generator": "chain_sum",
    "generator_options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
}


def main() -> None:
    """Measure in turn and print the table."""
    if not TRL_PYTHON.exists():
        raise SystemExit(f"{TRL_PYTHON} is missing; `make bench-trl` makes that environment")
    machine = measure()
    print(machine.describe())
    pairs, tasks, steps = setting("PAIRS", 3), setting("TASKS", 8), setting("STEPS", 5)
    samples = tasks * WORKLOAD["group_size"]
    with tempfile.TemporaryDirectory() as scratch:
        model = endless_copy(fetch(), Path(scratch) / "model")
        workload = {**WORKLOAD, "model": str(model), "tasks_per_step": tasks, "steps": steps}
        trl, ours = alternate(
            pairs,
            lambda: side([str(TRL_PYTHON), "benchmarks/trl_side.py"], {**workload, **trl_settings(tasks)}),
            lambda: side([sys.executable, "-m", "benchmarks.trl_our_side"], workload),
        )
    check_same_work([*trl, *ours])
    theirs_s, ours_s = ([samples_per_s(report, samples) for report in reports] for reports in (trl, ours))
    ratio = median([mine / other for mine, other in zip(ours_s, theirs_s, strict=True)])
    theirs_gb, ours_gb = (median([report["memory_gb"] for report in reports]) for reports in (trl, ours))
    cpu = median([_cpu(other) / _cpu(mine) for mine, other in zip(ours, trl, strict=True)])
    is_whole = tasks == 8
    share = check_baseline("TRL", max(theirs_s), RECORDED, machine) if is_whole else None
    limit = machine.bf16_gflops if has_fast_bfloat16() else machine.fp32_medium_gflops
    of_limit = max(theirs_s) * GFLOP_PER_SAMPLE / limit
    precision = "bfloat16 over float32 masters" if has_fast_bfloat16() else "float32"
    print(f"\n{tasks} tasks x 8, {steps} steps, {pairs} pairs, {precision}")
    print(f"  {'':8}{'samples/s':>10}{'peak GB':>9}")
    print(f"  {'TRL':8}{median(theirs_s):10.2f}{theirs_gb:9.2f}   {of_limit:.0%} of the machine's matmul limit")
    print(f"  {'Triune':8}{median(ours_s):10.2f}{ours_gb:9.2f}")
    print(f"  {'ratio':8}{ratio:10.2f}{ours_gb / theirs_gb:9.2f}   (by processor seconds {cpu:.2f})")
    seconds = {name: median([report["seconds"].get(name, 0.0) for report in ours]) for name in ours[0]["seconds"]}
    for name, value in seconds.items():
        print(f"    {name:20}{value:8.3f} s a step")
    print(
        json.dumps(
            {
                "ratio_samples_per_s": round(ratio, 3),
                "ratio_memory": round(ours_gb / theirs_gb, 3),
                "ratio_cpu": round(cpu, 3),
                "trl_samples_per_s": round(median(theirs_s), 3),
                "samples_per_s": round(median(ours_s), 3),
                "trl_memory_gb": round(theirs_gb, 2),
                "memory_gb": round(ours_gb, 2),
                "trl_share_of_recorded": None if share is None else round(share, 3),
                "trl_share_of_limit": round(of_limit, 3),
                "precision": precision,
                "seconds_per_step": {name: round(value, 4) for name, value in seconds.items()},
                "machine": machine.to_json(),
            }
        )
    )


GFLOP_PER_SAMPLE = 0.269 * (36 / 8 + 16) + 0.807 * (36 + 16)
"""2 x parameters a token sampled (the prompt once per group), 6 x parameters a token trained, prompts of 36."""


def trl_settings(tasks: int) -> dict[str, Any]:
    """The fastest for TRL that was found."""
    rows = min(16, tasks * WORKLOAD["group_size"])
    return {"attention": "eager", "micro_batch": rows, "settings": {"bf16": has_fast_bfloat16()}}


def side(command: list[str], workload: dict[str, Any]) -> dict[str, Any]:
    """Run one side in a fresh folder and read its report."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        run_side([*command, json.dumps({**workload, "report": str(report)})], env={"TOKENIZERS_PARALLELISM": "false"})
        return json.loads(report.read_text())


def check_same_work(reports: list[dict[str, Any]]) -> None:
    """Every answer of both sides had all its tokens."""
    lengths = {length for report in reports for length in report["mean_length"]}
    if lengths != {float(WORKLOAD["max_tokens"])}:
        raise SystemExit(
            f"answers of {sorted(lengths)} tokens on average; expected {WORKLOAD['max_tokens']} on both sides"
        )


def endless_copy(source: Path, target: Path) -> Path:
    """The model with an end token that is never sampled, so that all answers are as long as they may be."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix == ".safetensors":
            (target / file.name).symlink_to(file)
        else:
            shutil.copy(file, target / file.name)
    text, number = NEVER_SAMPLED
    for name in ("config.json", "generation_config.json"):
        fields = json.loads((target / name).read_text())
        (target / name).write_text(json.dumps({**fields, "eos_token_id": number, "pad_token_id": number}))
    tokenizer = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "eos_token": text, "pad_token": text}))
    template = (target / "chat_template.jinja").read_text()
    ends = f"message['content'] + ('{text}' if message['role'] == 'assistant' else '<|im_end|>')"
    changed = template.replace("message['content'] + '<|im_end|>'", ends)
    if changed == template:
        raise SystemExit("the chat template of SmolLM2 is not the one this bench knows")
    (target / "chat_template.jinja").write_text(changed)
    return target


def _cpu(report: dict[str, Any]) -> float:
    return sum(report["cpu_s"]) / len(report["cpu_s"])


if __name__ == "__main__":
    main()
