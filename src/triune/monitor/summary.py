"""`summary.json`: how a run stands or how it ended, for programs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triune.errors import TriuneError
from triune.monitor.series import Series

MAX_METRICS = 512
"""Names that are followed over steps; more would make memory grow with the data."""


def metrics_summary(series: Mapping[str, Series]) -> dict[str, dict[str, float]]:
    """First, last, smallest and largest value of each metric, with the steps of the first and the last."""
    found = {}
    for name, values in series.items():
        if values.first is not None and values.last is not None:
            found[name] = {
                "first": values.first[1],
                "last": values.last[1],
                "min": values.minimum,
                "max": values.maximum,
                "first_step": values.first[0],
                "last_step": values.last[0],
            }
    return found


def error_summary(error: BaseException) -> dict[str, str]:
    """The four parts of an error and its causes' one-line messages."""
    summary = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, TriuneError):
        summary |= {"where": error.where, "found": error.found, "expected": error.expected, "do": error.do}
    cause = error.__cause__
    if cause is not None:
        summary["cause"] = f"{type(cause).__name__}: {cause}"
    return summary


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file in one move; NaN and infinities become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(_finite(content), indent=2, default=str) + "\n", encoding="utf-8")
    temporary.replace(path)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
