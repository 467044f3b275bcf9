"""Real tokens per second of one optimiser step, against the padded Hugging Face loop, in turn (ABAB).

    python -m benchmarks.bench_train          (make bench-train)

SmolLM2-135M, 16 ragged sequences, the same loss tokens on both sides, float32 masters and AdamW, each side in a process
of its own so that its peak memory is its own. Further rows: pure bfloat16, LoRA, and groups of eight short answers to
one prompt (what GRPO trains on). Where the CPU has no bfloat16 products the opponent also runs in float32, and the
faster of its two figures counts.

    TRIUNE_BENCH_ROWS       main,bf16,lora,groups
    TRIUNE_BENCH_PAIRS      rounds per row (3)
    TRIUNE_BENCH_STEPS      timed steps per round, after one to warm up (2)
    TRIUNE_BENCH_SEQUENCES  sequences of a step (16; the row `groups` takes four times as many)
    TRIUNE_BENCH_LONGEST    longest answer (320)
"""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.limits import SlowBaseline, check_baseline, measure
from benchmarks.pairs import alternate, median, module_side, names, setting

RECORDED = {"main": 316.0}
"""tok/s of the opponent on the reference machine."""

HF_MICRO_BATCH = 4


def run_row(row: str, fast_bf16: bool, threads: int) -> dict[str, Any]:
    """Both sides of a row, in turn; medians over all timed steps."""
    usual = "bfloat16" if fast_bf16 else "float32"
    case: dict[str, Any] = {
        "load": "grouped" if row == "groups" else "ragged",
        "sequences": setting("SEQUENCES", 16) * (4 if row == "groups" else 1),
        "longest": setting("LONGEST", 320),
        "steps": setting("STEPS", 2),
        "precision": "pure" if row == "bf16" else usual,
        "lora": row == "lora",
        "threads": threads,
        "micro_batch": HF_MICRO_BATCH,
    }
    sides = [{**case, "side": "triune"}, {**case, "side": "hf"}]
    if row == "main" and not fast_bf16:
        sides.append({**case, "side": "hf", "precision": "bfloat16"})
    rounds = alternate(
        setting("PAIRS", 3), *(lambda side=side: module_side("benchmarks.train_side", side) for side in sides)
    )
    figures = [_figures(reports) for reports in rounds]
    ours, theirs = figures[0], max(figures[1:], key=lambda one: one["tokens_per_s"])
    return {
        "triune": ours,
        "hf": theirs,
        "ratio": round(ours["tokens_per_s"] / theirs["tokens_per_s"], 3),
        "ratio_memory": round(ours["peak_mib"] / theirs["peak_mib"], 3),
        "loss_gap": round(abs(ours["loss"] - theirs["loss"]), 4),
    }


def _figures(reports: list[dict[str, Any]]) -> dict[str, float]:
    seconds = median([value for report in reports for value in report["seconds"]])
    return {
        "tokens_per_s": round(reports[0]["tokens"] / seconds, 2),
        "step_s": round(seconds, 3),
        "peak_mib": round(max(report["peak_mib"] for report in reports)),
        "loss": round(reports[0]["losses"][0], 4),
    }


def main() -> int:
    """Print the table and, as the last line, one JSON object; 1 when the main row misses its target."""
    from triune.models.device import has_fast_bfloat16

    machine = measure()
    print(machine.describe())
    rows = {}
    for row in names("ROWS", ["main", "bf16", "lora", "groups"]):
        found = rows[row] = run_row(row, has_fast_bfloat16(), machine.threads)
        ours, theirs = found["triune"], found["hf"]
        print(
            f"{row:7} triune {ours['tokens_per_s']:8.1f} tok/s {ours['peak_mib']:6.0f} MiB   "
            f"hf {theirs['tokens_per_s']:8.1f} tok/s {theirs['peak_mib']:6.0f} MiB   "
            f"ratio {found['ratio']:.2f}, memory {found['ratio_memory']:.2f}, loss differs by {found['loss_gap']}",
            flush=True,
        )
    shares = {}
    try:
        for row, recorded in RECORDED.items():
            if row in rows:
                shares[row] = round(
                    check_baseline("padded loop", rows[row]["hf"]["tokens_per_s"], recorded, machine), 3
                )
    except SlowBaseline as slow:
        print(slow, file=sys.stderr)
        return 1
    ratios = {f"ratio_{row}": found["ratio"] for row, found in rows.items()}
    memory = {f"ratio_memory_{row}": found["ratio_memory"] for row, found in rows.items()}
    print(
        json.dumps(
            {
                "bench": "train",
                "ratio": rows[next(iter(rows))]["ratio"],
                **ratios,
                **memory,
                "rows": rows,
                "baseline_share_of_recorded": shares,
                "machine": machine.to_json(),
            }
        )
    )
    return 0 if all(found["ratio"] >= 1.25 for row, found in rows.items() if row == "main") else 1


if __name__ == "__main__":
    raise SystemExit(main())
