"""Whether every algorithm of the zoo learns: `make bench-zoo`.

Each runs on the shipped model (0.4 of the sums right) with several seeds; those that learn from files get rows of right
and wrong answers and never see the reward. What counts is final minus initial accuracy on held-out sums, sampled: its
mean over seeds, and the lower end of a 95 % interval by Student's t. `on_policy_distill` and `jsd` learn from a teacher
that GRPO made first.

    TRIUNE_BENCH_ALGORITHMS=grpo,dpo TRIUNE_BENCH_SEEDS=2 TRIUNE_BENCH_STEPS=10 make bench-zoo

Exit code 1 when an algorithm that is not in `EXCEPTIONS` did not surely learn.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.pairs import names, setting

EXCEPTIONS: dict[str, str] = {}
"""Algorithms that need not learn here, and why."""

QUANTILES = {2: 6.314, 3: 2.920, 4: 2.353, 5: 2.132, 6: 2.015, 7: 1.943, 8: 1.895}
"""95 % quantiles of Student's t, one-sided, by number of seeds."""

TEACHER_STEPS = 60


def learn(algorithm: str, folder: Path, steps: int, seed: int) -> dict[str, Any]:
    """Run one algorithm with one seed, in this process; initial and final accuracy, and seconds."""
    import triune
    from triune.testing.zoo_runs import zoo_run

    config = zoo_run(algorithm, folder, steps=steps, seed=seed)
    began = time.perf_counter()
    triune.run(config, restart=True)
    seconds = time.perf_counter() - began
    rows = map(json.loads, (folder / "runs" / config["name"] / "eval.jsonl").read_text().splitlines())
    accuracy = [row["mean@1"] for row in rows if row["kind"] == "set"]
    return {"initial": accuracy[0], "final": accuracy[-1], "seconds": seconds}


def in_own_process(*arguments: object) -> dict[str, Any]:
    """`learn` in a process of its own, so that no run finds what another left behind."""
    command = [sys.executable, "-m", "benchmarks.bench_zoo", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def make_teacher(folder: Path) -> None:
    """A model that GRPO taught, in `folder/teacher`."""
    learn("grpo", folder, TEACHER_STEPS, 99)
    shutil.copytree(folder / "runs" / "grpo-99" / "export", folder / "teacher")


def main() -> int:
    """Print the table and, as the last line, one JSON object."""
    from triune import registry

    chosen = names("ALGORITHMS", registry.names("algorithm"))
    seeds, steps = setting("SEEDS", 3), setting("STEPS", 40)
    figures, failed = {}, []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_teacher(folder)
        for algorithm in chosen:
            found = [in_own_process(algorithm, folder, steps, seed) for seed in range(seeds)]
            figures[algorithm] = row = judged(found)
            learned = row.get("lower", -1.0) > 0
            if not learned and algorithm not in EXCEPTIONS:
                failed.append(algorithm)
            print(line(algorithm, row, learned), flush=True)
    print(json.dumps({"bench": "zoo", "steps": steps, "seeds": seeds, "algorithms": figures, "failed": failed}))
    return 1 if failed else 0


def judged(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds, and the lower end of the interval of the gain."""
    errors = [each["error"] for each in found if "error" in each]
    if errors:
        return {"error": errors[0]}
    gains = [each["final"] - each["initial"] for each in found]
    mean = sum(gains) / len(gains)
    row = {name: round(sum(each[name] for each in found) / len(found), 3) for name in ("initial", "final", "seconds")}
    row["gain"] = round(mean, 3)
    if len(gains) in QUANTILES:
        deviation = (sum((gain - mean) ** 2 for gain in gains) / (len(gains) - 1)) ** 0.5
        row["lower"] = round(mean - QUANTILES[len(gains)] * deviation / len(gains) ** 0.5, 3)
    return row


def line(algorithm: str, row: dict[str, Any], learned: bool) -> str:
    """A line of the table."""
    if "error" in row:
        return f"{algorithm:20} failed: {row['error']}"
    end = "" if learned else f"   not shown{': ' + EXCEPTIONS[algorithm] if algorithm in EXCEPTIONS else ''}"
    lower = f"{row['lower']:+.3f}" if "lower" in row else "   –  "
    return (
        f"{algorithm:20} {row['initial']:.3f} → {row['final']:.3f}   gain {row['gain']:+.3f}, surely above {lower}"
        f"   {row['seconds']:5.1f} s{end}"
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        name, where, num, seed = sys.argv[1:]
        print(json.dumps(learn(name, Path(where), int(num), int(seed))))
        raise SystemExit
    raise SystemExit(main())
