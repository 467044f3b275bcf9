"""What the runs of a comparison say, as one table and one picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from triune.config import RunConfig
from triune.launcher.intervals import Estimate, estimate, paired
from triune.launcher.standing import read_summary
from triune.monitor.bands import Band, draw_bands
from triune.monitor.history import past_steps, read_rows

FOREVER = 1 << 62


@dataclass(kw_only=True)
class Variant:
    """One run file with all its seeds.

    Attributes:
        name: Stem of the file.
        file: The file.
        runs: Seed → its run.
        errors: Seed → what ended its run.
    """

    name: str
    file: str
    runs: dict[int, RunConfig]
    errors: dict[int, str] = field(default_factory=dict)


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What one run says.

    Attributes:
        curve: Step → value of the metric.
        metrics: Names that it has.
        seconds: Wall-clock time, of all its incarnations.
        samples: Sequences that were trained on.
    """

    curve: dict[int, float]
    metrics: tuple[str, ...]
    seconds: float
    samples: int


def measure(folder: Path, metric: str) -> Measured:
    """Read the curve of a finished run, and what it cost."""
    curve: dict[int, float] = {}
    names: set[str] = set()
    samples = 0.0
    for step, metrics in past_steps(folder / "metrics.jsonl", FOREVER):
        names |= metrics.keys()
        samples += metrics.get("num_sequences", 0.0)
        value = metrics.get(metric)
        if value is not None and math.isfinite(value):
            curve[step] = value
    seconds = read_summary(folder).get("seconds", 0.0) + _earlier_s(folder)
    return Measured(curve=curve, metrics=tuple(sorted(names)), seconds=seconds, samples=round(samples))


def _earlier_s(folder: Path) -> float:
    """Seconds between the first and the last row of the incarnations before the last one."""
    total, began, last = 0.0, None, 0.0
    for row in read_rows(folder / "metrics.jsonl"):
        at = row.get("time_s")
        if not isinstance(at, int | float):
            continue
        if "resumed_step" in row and began is not None:
            total, began = total + last - began, None
        began, last = at if began is None else began, at
    return total


def build_report(variants: Sequence[Variant], metric: str, folder: Path, status: str) -> dict[str, Any]:
    """The table with everything behind it; the picture is drawn when nothing runs any more."""
    found = {
        variant.name: {
            seed: measure(run.run_dir, metric)
            for seed, run in variant.runs.items()
            if read_summary(run.run_dir).get("status") == "finished"
        }
        for variant in variants
    }
    first = found[variants[0].name]
    rows = [_row(variant, found[variant.name], None if variant is variants[0] else first) for variant in variants]
    bands = [Band(name=row["name"], **row["curve"]) for row in rows if status != "running"]
    picture = draw_bands(bands, folder / "compare.png", title=" / ".join(found), metric=metric)
    return {
        "status": status,
        "metric": metric,
        "seeds": list(variants[0].runs),
        "variants": rows,
        "picture": None if picture is None else str(picture),
        "folder": str(folder),
    }


def _row(variant: Variant, runs: Mapping[int, Measured], first: Mapping[int, Measured] | None) -> dict[str, Any]:
    initial = {seed: run.curve[min(run.curve)] for seed, run in runs.items() if run.curve}
    final = _finals(runs)
    seconds, samples = estimate([run.seconds for run in runs.values()]), [run.samples for run in runs.values()]
    return {
        "name": variant.name,
        "file": variant.file,
        "status": "failed" if variant.errors else "finished" if len(runs) == len(variant.runs) else "unfinished",
        "errors": {str(seed): text for seed, text in variant.errors.items()},
        "seeds": sorted(final),
        "initial": _plain(estimate([initial[seed] for seed in sorted(initial)])),
        "final": _plain(estimate([final[seed] for seed in sorted(final)])),
        "difference": _plain(paired(final, initial)),
        "against_first": None if first is None else _plain(paired(final, _finals(first))),
        "seconds": None if seconds is None else round(seconds.mean, 3),
        "samples": round(sum(samples) / len(samples)) if samples else None,
        "curve": mean_curve([run.curve for run in runs.values() if run.curve]),
    }


def _finals(runs: Mapping[int, Measured]) -> dict[int, float]:
    return {seed: run.curve[max(run.curve)] for seed, run in runs.items() if run.curve}


def mean_curve(curves: Sequence[Mapping[int, float]]) -> dict[str, list[Any]]:
    """Mean and interval at the steps that all seeds have: elsewhere a seed that is missing would look like a jump."""
    steps = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    points = [point for step in steps if (point := estimate([curve[step] for curve in curves])) is not None]
    return {
        "steps": steps,
        "mean": [point.mean for point in points],
        "low": [point.low for point in points],
        "high": [point.high for point in points],
    }


def _plain(value: Estimate | None) -> dict[str, Any] | None:
    return None if value is None else msgspec.to_builtins(value)
