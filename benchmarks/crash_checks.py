"""What must hold after a crash and at the end of a run, read from outside with the product's own Python API.

What was trained is read from three sources that must agree: the store's uses, the checkpoints on disk, and a diary that
the trainer's sampling writes for itself (`crash_plugin.Diary`), of which only the batches on the surviving line count.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triune.buffer
from triune.buffer import check_conservation
from triune.buffer.stores.postgres import MARK
from triune.monitor.history import surviving_rows
from triune.records import GroupId


class Broken(AssertionError):
    """Something was lost, doubled or hung; the message says what, and where the folder and logs are."""


def check_store(run_dir: Path) -> dict[str, float]:
    """The conservation law, at any moment; the store's numbers, none where there is no store yet."""
    if not any((run_dir / name).exists() for name in ("buffer.sqlite", MARK)):
        return {}
    with triune.buffer.open(run_dir) as opened, opened.store.db.transaction():
        check_conservation(opened.store.db)
        return dict(opened.store.entries.stats(None))


def check_finished(run_dir: Path, diary: Path, bases: Sequence[tuple[int, int]], steps: int) -> Counter[str]:
    """All laws at the end; the multiset of trained task keys.

    Args:
        run_dir: Of the run.
        diary: What its sampling wrote.
        bases: (process, step it went on from) of everything that ever trained, in order.
        steps: Of the whole run.
    """
    stats = check_store(run_dir)
    if stats["uses/leased"] or stats["open"]:
        raise Broken(f"left over: {stats['uses/leased']:.0f} leases, {stats['open']:.0f} open")
    summary = json.loads((run_dir / "summary.json").read_text())
    if summary["status"] != "finished" or summary["steps"] != steps:
        raise Broken(f"summary says {summary['status']} after {summary['steps']} steps")
    _check_rows(run_dir, steps)
    trained = surviving_uses(diary, bases, steps)
    doubled = [use for use, number in Counter(trained).items() if number > 1]
    if doubled:
        raise Broken(f"trained twice on one line: {doubled}")
    acked = _acknowledged_uses(run_dir)
    if acked != Counter(trained):
        raise Broken(f"acknowledged but not trained, or the reverse: {acked} and {trained}")
    return Counter(GroupId.parse(entry).task_key for entry, _ in trained)


def _check_rows(run_dir: Path, steps: int) -> None:
    """Every step has its row in `metrics.jsonl`, on the line that survived."""
    rows = [row for row in surviving_rows(run_dir / "metrics.jsonl") if row["role"] == "trainer"]
    there: set[Any] = {row["step"] for row in rows if "loss" in row}
    if there != set(range(1, steps + 1)):
        raise Broken(f"metrics.jsonl has the trainer's rows of steps {sorted(there)}")


def _acknowledged_uses(run_dir: Path) -> Counter[tuple[str, int]]:
    """(entry, use number) of every acknowledged use; `triune buffer verify` has nothing to say about the store."""
    sql = "SELECT e.entry, u.use_no FROM uses u JOIN entries e ON e.seq = u.entry WHERE u.state = 'acked'"
    with triune.buffer.open(run_dir) as opened:
        findings = opened.verify().findings
        if findings:
            raise Broken(f"verify found {findings}")
        with opened.store.db.transaction():
            return Counter((entry, use_no) for entry, use_no in opened.store.db.all(sql))


def surviving_uses(diary: Path, bases: Sequence[tuple[int, int]], steps: int) -> list[tuple[str, int]]:
    """What the diary says was trained on, without the batches of lost steps."""
    batches: dict[int, list[list[Any]]] = {}
    for line in diary.read_text().splitlines():
        page = json.loads(line)
        if page["uses"]:
            batches.setdefault(page["pid"], []).append(page["uses"])
    found: list[tuple[str, int]] = []
    ends = [base for _, base in bases[1:]] + [steps]
    for (pid, base), end in zip(bases, ends, strict=True):
        survived = batches.get(pid, [])[: max(0, end - base)]
        if len(survived) < end - base:
            raise Broken(f"steps {base + 1}–{end} survive but only {len(survived)} were trained")
        found += [(entry, use_no) for uses in survived for entry, use_no, _ in uses]
    return found
