"""Microseconds per group on the whole way through the buffer: admit, put (raw and shaped), lease, ack.

    python benchmarks/buffer_path.py [rounds] [memory|sqlite]

32 groups of 8 short experiences arrive together, as at the end of a decode wave. The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

from triune.buffer import BufferSettings, open_buffer
from triune.buffer.stores.memory import Memory
from triune.buffer.stores.sqlite import SQLite
from triune.ports import AdmissionRule
from triune.records import Task
from triune.testing.groups import make_group, with_mean_advantages

NUM_GROUPS, NUM_MEMBERS = 32, 8


async def measure(rounds: int, store: str, folder: Path) -> dict[str, float]:
    """Median microseconds per group of each stage."""
    buffer = open_buffer(BufferSettings(store=Memory() if store == "memory" else SQLite()), folder)
    await buffer.open_run("bench", config_hash="", data_hash="")
    rule = AdmissionRule(max_staleness=0, fresh=1e9)
    rewards = [float(n % 2) for n in range(NUM_MEMBERS)]
    stages: dict[str, list[float]] = {"admit": [], "put": [], "lease": [], "ack": []}
    for number in range(rounds):
        marks = [time.perf_counter()]
        groups = await asyncio.gather(
            *(buffer.admit(Task(key=f"{number}-{n}"), rule, cursor=[number, n]) for n in range(NUM_GROUPS))
        )
        marks.append(time.perf_counter())
        raws = [make_group(group, rewards=rewards, prompt=12, answer=8) for group in groups if group is not None]
        pairs = [(raw, with_mean_advantages(raw)) for raw in raws]
        made = time.perf_counter()
        await asyncio.gather(*(buffer.put(raw, shaped) for raw, shaped in pairs))
        marks.append(time.perf_counter() - made + marks[-1])
        begin = time.perf_counter()
        leases = await buffer.lease(NUM_GROUPS)
        marks.append(time.perf_counter() - begin + marks[-1])
        begin = time.perf_counter()
        await buffer.ack([(lease.entry, lease.use_no) for lease in leases], checkpoint="c", step=number)
        marks.append(time.perf_counter() - begin + marks[-1])
        for stage, one, other in zip(stages, marks, marks[1:], strict=False):
            stages[stage].append(other - one)
    await buffer.check_conservation()
    await buffer.close()
    found = {stage: sorted(values)[len(values) // 2] / NUM_GROUPS * 1e6 for stage, values in stages.items() if values}
    return {**found, "total": sum(found.values())}


def main() -> None:
    """Measure and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    store = sys.argv[2] if len(sys.argv) > 2 else "sqlite"
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(rounds, store, Path(folder)))
    for stage, value in found.items():
        print(f"{stage:8} {value:8.1f} µs per group of {NUM_MEMBERS}, {NUM_GROUPS} at once, store {store}")
    print(json.dumps({"store": store, "us_per_group": {stage: round(value, 1) for stage, value in found.items()}}))


if __name__ == "__main__":
    main()
