"""What earlier incarnations of a run wrote to `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from triune.monitor.steps import StepMerger


def read_rows(path: Path) -> Iterator[dict[str, object]]:
    """Rows of a `metrics.jsonl` in file order; a torn last line is left out."""
    if not path.is_file():
        return
    decode = msgspec.json.Decoder(dict).decode
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield decode(line)


def surviving_rows(path: Path) -> list[dict[str, object]]:
    """Rows without those that a resume threw away (steps after the checkpoint it went on from)."""
    kept: list[dict[str, object]] = []
    for row in read_rows(path):
        resumed = row.get("resumed_step")
        if isinstance(resumed, int | float):
            kept = [old for old in kept if _step(old) <= resumed]
        kept.append(row)
    return kept


def past_steps(path: Path, until: int) -> Iterator[tuple[int, Mapping[str, float]]]:
    """Merged metrics of the steps up to `until` on the surviving line, and evaluations as they were logged."""
    merger = StepMerger(("explorer", "trainer"))
    for row in surviving_rows(path):
        step, role = _step(row), str(row.get("role"))
        if step > until or role == "monitor":
            continue
        metrics = {
            name: float(value)
            for name, value in row.items()
            if isinstance(value, int | float) and name not in ("step", "time_s")
        }
        if role == "eval":
            yield step, metrics
            continue
        yield from merger.add(role, step, metrics)
    yield from merger.rest()


def _step(row: Mapping[str, object]) -> int:
    step = row.get("step")
    return step if isinstance(step, int) else -1
