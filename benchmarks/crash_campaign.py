"""kill -9 of `triune run`, `explore` and `train` at random moments and at named places: `make crash`.

Every run is killed several times and resumed after each; at its end nothing may be lost and nothing trained twice.
Sizes: TRIUNE_CRASH_KILLS (of each command, default 20), TRIUNE_CRASH_SEED; arguments name single scenarios. Prints a
table, and as its last line JSON.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import crash_harness as harness

PER_RUN = 4
"""Kills that one run survives."""

ASYNCHRONOUS: dict[str, Any] = {"sync": {"max_staleness": 1, "style": "inflight", "channel": "memory"}}

Scenario = Callable[[Path, int, random.Random], tuple[harness.Flight, Counter[str]]]

SCENARIOS: dict[str, Scenario] = {
    "run": lambda folder, num, chance: harness.killed_at_random(folder, num, chance),
    "run, in flight": lambda folder, num, chance: harness.killed_at_random(folder, num, chance, **ASYNCHRONOUS),
    "explore": lambda folder, num, chance: harness.one_of_two_killed(folder, "explore", num, chance),
    "train": lambda folder, num, chance: harness.one_of_two_killed(folder, "train", num, chance),
    "failpoints": lambda folder, num, chance: harness.killed_at_failpoints(folder, harness.FAILPOINTS),
    "amending": lambda folder, num, chance: harness.killed_while_amending(folder),
}


def campaign(names: Sequence[str], kills: int, seed: int, root: Path) -> dict[str, Any]:
    """Scenarios by name; prints a row for each run and returns the figures."""
    began, expected = time.monotonic(), harness.uninterrupted(_fresh(root / "whole"))
    print(f"{'scenario':<16}{'kills':>6}{'resumed from step':>24}{'seconds':>9}  outcome")
    figures: dict[str, Any] = {"seed": seed, "kills": {}, "runs": 0, "broken": []}
    for name in names:
        scenario = SCENARIOS[name]
        wanted, run = (kills if name not in ("failpoints", "amending") else 1), 0
        while figures["kills"].get(name, 0) < wanted:
            run += 1
            number = min(PER_RUN, wanted - figures["kills"].get(name, 0))
            done = _one_run(name, scenario, number, random.Random(f"{seed} {name} {run}"), root, expected, figures)
            figures["kills"][name] = figures["kills"].get(name, 0) + done
    figures["seconds"] = round(time.monotonic() - began, 1)
    return figures


def _one_run(
    name: str,
    scenario: Scenario,
    number: int,
    chance: random.Random,
    root: Path,
    expected: Counter[str],
    figures: dict[str, Any],
) -> int:
    """One run through its kills; the number of them. A broken law is printed, counted, and its folder kept."""
    began, folder = time.monotonic(), _fresh(root / f"{name} {figures['runs']}".replace(", ", "-").replace(" ", "-"))
    figures["runs"] += 1
    try:
        flight, trained = scenario(folder, number, chance)
        if trained != expected:
            raise harness.Broken(f"trained {trained - expected}, missed {expected - trained}; {flight.where()}")
    except harness.Broken as broken:
        figures["broken"].append(f"{name}: {broken}".splitlines()[0])
        print(f"{name:<16}{'':>39}  BROKEN {broken}", flush=True)
        return number
    steps = " ".join(str(base) for _, base in flight.bases[1:])
    print(f"{name:<16}{len(flight.kills):>6}{steps:>24}{time.monotonic() - began:>9.1f}  {'; '.join(flight.kills)}")
    sys.stdout.flush()
    shutil.rmtree(folder)
    return max(1, len(flight.kills))


def _fresh(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def main() -> int:
    """Run the campaign in a temporary folder, which stays when something broke."""
    kills, seed = int(os.environ.get("TRIUNE_CRASH_KILLS", "20")), int(os.environ.get("TRIUNE_CRASH_SEED", "0"))
    root = Path(tempfile.mkdtemp(prefix="triune-crash-"))
    figures = campaign(sys.argv[1:] or list(SCENARIOS), kills, seed, root)
    if not figures["broken"]:
        shutil.rmtree(root, ignore_errors=True)
    print(json.dumps(figures))
    return 1 if figures["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
