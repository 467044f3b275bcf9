"""What the buffer costs: experiences/s put and leased against the bare driver, and leases among a million that wait.

    python -m benchmarks.bench_buffer        (or `make bench-buffer`)

Throughput: records of 2, 10 and 100 KB, in groups of 8, put by 1 and by 4 processes in transactions of 64 records
(`put_many`), then leased in batches of 64 by another process. Beside it, in turn, the same records through sqlite3
(psycopg) alone, a row each. `ratio…` is Triune's experiences/s divided by the bare ones; goal 0.5. `ratio_cpu…` is the
same by processor seconds of these processes, which other work on the machine does not change. Triune's side checks,
encodes and decodes every record and keeps what fences, priorities and resumes need; the bare side moves bytes that
were made before.

Latency: leases of 64 entries, while a thousand and while a million wait: by the stored priority (an index), in the
order of admission, and by a priority that a user wrote. `ratio_lease…` is the million's over the thousand's; goal at
most 3. `ratio_lease_cpu…` is the same by processor time.

Sizes: TRIUNE_BENCH_KILOBYTES (2,10,100), TRIUNE_BENCH_WRITERS (1,4), TRIUNE_BENCH_MEGABYTES (32 of each case),
TRIUNE_BENCH_PAIRS (3), TRIUNE_BENCH_WAITING (1000000), TRIUNE_BENCH_LEASES (200), TRIUNE_BENCH_BATCH (64),
TRIUNE_BENCH_GROUP (8). TRIUNE_BENCH_POSTGRES: URL of a PostgreSQL database that may be written to.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.buffer_side import RUN, make_bare_table, settings_of, tokens_of
from benchmarks.pairs import SideFailed, alternate, median, names, setting
from triune.buffer import Candidate, open_buffer
from triune.ports import WeightUpdate
from triune.testing.bulk import insert_entries

BATCH, GROUP, PAIRS = setting("BATCH", 64), setting("GROUP", 8), setting("PAIRS", 3)
LEASES = setting("LEASES", 200)


def user_priority(candidate: Candidate) -> float:
    """A priority as a user writes it: fresh, novel, and not too easy."""
    novelty = 1.0 / (1 + candidate.task_uses)
    return candidate.priority + novelty - 0.1 * candidate.staleness - abs((candidate.reward or 0.0) - 0.5)


# ------------------------------------------------------------------------------------------------ throughput


def run_together(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Processes that begin at one moment; what each reported.

    Raises:
        SideFailed: One of them failed.
    """
    command = [sys.executable, "-m", "benchmarks.buffer_side"]
    sides = [
        subprocess.Popen([*command, json.dumps(case)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for case in cases
    ]
    try:
        for side in sides:
            assert side.stdout is not None, "it is a pipe"
            if side.stdout.readline() != "ready\n":
                raise SideFailed(f"{' '.join(command)}: it ended before it was ready (see above)")
        for side in sides:
            assert side.stdin is not None, "it is a pipe"
            side.stdin.write("go\n")
            side.stdin.flush()
        said = [side.communicate(timeout=600)[0] for side in sides]
    finally:
        for side in sides:
            if side.poll() is None:
                side.kill()
    if any(side.returncode for side in sides):
        raise SideFailed(f"{' '.join(command)}: exit {[side.returncode for side in sides]}")
    return [json.loads(text.strip().splitlines()[-1]) for text in said]


def cpu_s(reports: list[dict[str, Any]]) -> float:
    """Processor seconds of all of them."""
    return sum(report["cpu_s"] for report in reports)


def wall_s(reports: list[dict[str, Any]]) -> float:
    """From the first that began to the last that ended."""
    return max(report["end"] for report in reports) - min(report["begin"] for report in reports)


def put_and_lease(side: str, base: Mapping[str, Any], writers: int, store: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds that one side takes to put all records, and to lease them."""
    with tempfile.TemporaryDirectory() as folder:
        case = {**base, "folder": folder, "store": store}
        writing = [
            {**case, "side": f"{side}_write", "writer": n, "num": base["num"] // writers} for n in range(writers)
        ]
        leasing = [{**case, "side": f"{side}_lease"}]
        if side == "bare":
            make_bare_table(case)
            put, lease = run_together(writing), run_together(leasing)
        else:
            put, lease = asyncio.run(_with_run(case, writing, leasing))
    return {"put_s": wall_s(put), "lease_s": wall_s(lease), "cpu_s": cpu_s(put) + cpu_s(lease)}


async def _with_run(case: dict[str, Any], writing: list[dict[str, Any]], leasing: list[dict[str, Any]]) -> Any:
    """Do both while this process holds the run open, as a trainer does."""
    buffer = open_buffer(settings_of(case), Path(case["folder"]))
    await _begin(buffer)
    put = await asyncio.to_thread(run_together, writing)
    lease = await asyncio.to_thread(run_together, leasing)
    await buffer.check_conservation()
    await buffer.close()
    return put, lease


async def _begin(buffer: Any) -> None:
    if await buffer.open_run(RUN, config_hash="", data_hash=""):
        await buffer.resume_at(step=1 << 30, version=0, consumed=[], checkpoint="", strict=False)
    else:
        version = await buffer.begin_version(0)
        await buffer.commit_version(WeightUpdate(version=version, step=0, digest="none", dtype="float32"))


def throughput(name: str, store: Mapping[str, Any], kilobytes: int, writers: int) -> dict[str, Any]:
    """Both sides in turn, and their ratio."""
    unit = BATCH * writers
    num = max(4 * unit, setting("MEGABYTES", 32) * 1000 // kilobytes // unit * unit)
    base = {"num": num, "group": GROUP, "batch": BATCH, "tokens": tokens_of(kilobytes * 1000)}
    ours, bare = alternate(
        PAIRS,
        lambda: put_and_lease("ours", base, writers, store),
        lambda: put_and_lease("bare", base, writers, store),
    )
    per_s = {side: num / median([one["put_s"] + one["lease_s"] for one in reports]) for side, reports in
             (("ours", ours), ("bare", bare))}  # fmt: skip
    parts = {
        f"{stage}_ratio": median([b[f"{stage}_s"] / o[f"{stage}_s"] for o, b in zip(ours, bare, strict=True)])
        for stage in ("put", "lease")
    }
    ratio = median([(b["put_s"] + b["lease_s"]) / (o["put_s"] + o["lease_s"]) for o, b in zip(ours, bare, strict=True)])
    cpu = median([b["cpu_s"] / o["cpu_s"] for o, b in zip(ours, bare, strict=True)])
    print(
        f"  {name:8} {kilobytes:4} KB  {writers} writers  {per_s['ours']:9.0f}  {per_s['bare']:9.0f}  {ratio:6.2f}"
        f"   put {parts['put_ratio']:.2f}  lease {parts['lease_ratio']:.2f}  by processor time {cpu:.2f}",
        flush=True,
    )
    return {
        "ratio": round(ratio, 3),
        "ratio_cpu": round(cpu, 3),
        **{key: round(value, 3) for key, value in parts.items()},
        "experiences_per_s": round(per_s["ours"]),
        "bare_per_s": round(per_s["bare"]),
    }


# --------------------------------------------------------------------------------------------------- latency

ORDERS: dict[str, dict[str, Any]] = {
    "indexed": {"order": "priority"},
    "age": {"order": "age"},
    "user": {"order": "priority", "priority": "benchmarks.bench_buffer:user_priority"},
}


async def latency(store: Mapping[str, Any], folder: Path, waiting: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of every lease, by order and clock, while this many entries wait; what is leased is replaced."""
    found: dict[str, dict[str, list[float]]] = {}
    position = 0
    for name, options in ORDERS.items():
        buffer = open_buffer(settings_of({"store": store, "priority": options.get("priority")}), folder)
        await _begin(buffer)
        position = position or _fill(buffer, waiting)
        times: dict[str, list[float]] = {"wall": [], "cpu": []}
        for step in range(LEASES + 3):
            begin, cpu = time.perf_counter(), time.process_time()
            leases = await buffer.lease(BATCH, order=options["order"], step=step, wait=False)
            times["wall"].append((time.perf_counter() - begin) * 1e3)
            times["cpu"].append((time.process_time() - cpu) * 1e3)
            assert len(leases) == BATCH, f"{len(leases)} leased"
            await buffer.ack([(lease.entry, lease.use_no) for lease in leases], checkpoint="c", step=step + 1)
            with buffer.store.db.transaction():
                insert_entries(buffer.store.db, RUN, position, len(leases))
            position += len(leases)
        found[name] = {clock: values[3:] for clock, values in times.items()}  # indexes made on first use, cold caches
        await buffer.close()
    return found


def _fill(buffer: Any, num: int) -> int:
    """Let so many entries wait; with a cache for the indexes while they grow, where the store is a file."""
    database, is_file = buffer.store.db, buffer.store.db.where.endswith(".sqlite")
    if is_file:
        database.execute("PRAGMA cache_size = -400000")
    with database.transaction():
        insert_entries(database, RUN, 0, num)
    if is_file:
        database.execute("PRAGMA cache_size = -2000")
    return num


def percentile(values: list[float], share: float) -> float:
    """The value that this share of them does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def latencies(name: str, store: Mapping[str, Any]) -> dict[str, Any]:
    """p50 and p99 by order with few and with many entries, and their ratios."""
    few, many = min(1000, setting("WAITING", 1_000_000)), setting("WAITING", 1_000_000)
    found: dict[int, dict[str, dict[str, list[float]]]] = {}
    for waiting in (few, many):
        with tempfile.TemporaryDirectory() as folder:
            found[waiting] = asyncio.run(latency(store, Path(folder), waiting))
    report: dict[str, Any] = {}
    for order in ORDERS:
        for share in (50, 99):
            line = f"  {name:8} {order:8} p{share}"
            for clock, infix in (("wall", ""), ("cpu", "cpu_")):
                low, high = (percentile(found[waiting][order][clock], share / 100) for waiting in (few, many))
                report[f"ratio_lease_{infix}{name}_{order}_p{share}"] = round(high / low, 2)
                report[f"lease_{infix}{name}_{order}_p{share}_ms"] = [round(low, 2), round(high, 2)]
                line += f"   {clock} {low:7.2f} ms of {few}, {high:7.2f} ms of {many}: x {high / low:.2f}"
            print(line, flush=True)
    return report


def main() -> None:
    """Measure, print a table, and one JSON object as the last line."""
    stores: dict[str, dict[str, Any]] = {"sqlite": {"use": "sqlite"}}
    if os.environ.get("TRIUNE_BENCH_POSTGRES"):
        stores["postgres"] = {"use": "postgres", "url": os.environ["TRIUNE_BENCH_POSTGRES"]}
    report: dict[str, Any] = {}
    print(f"put and leased, batches of {BATCH} in groups of {GROUP}: experiences/s, bare driver, ratio (goal 0.5)")
    for name, store in stores.items():
        for kilobytes in map(int, names("KILOBYTES", ("2", "10", "100"))):
            for writers in map(int, names("WRITERS", ("1", "4"))):
                case = throughput(name, store, kilobytes, writers)
                for key in ("ratio", "ratio_cpu"):
                    report[f"{key}_{name}_{kilobytes}kb_{writers}w"] = case.pop(key)
                report[f"{name}_{kilobytes}kb_{writers}w"] = case
    print(f"leases of {BATCH} (goal: at most 3 times as long)")
    for name, store in stores.items():
        report |= latencies(name, store)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
