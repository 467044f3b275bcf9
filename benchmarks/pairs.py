"""Two sides in turn (ABAB), each in a process of its own, so that neither warms, slows or fragments the other's."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class SideFailed(Exception):
    """A side ended with an error; the message holds the end of what it said."""


def run_side(command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float = 1800) -> str:
    """Run a process to its end and return its standard output.

    Raises:
        SideFailed: It failed or took too long.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, env={**os.environ, **(env or {})}
        )
    except subprocess.TimeoutExpired as error:
        raise SideFailed(f"{' '.join(command[:4])} …: not done after {timeout_s:.0f} s") from error
    if done.returncode:
        said = (done.stdout[-1000:] + done.stderr[-3000:]).strip()
        raise SideFailed(f"{' '.join(command[:4])} …: exit {done.returncode}\n{said}")
    return done.stdout


def module_side(module: str, case: Mapping[str, Any]) -> dict[str, Any]:
    """Run `python -m module '<case as JSON>'`; its last line is one JSON object."""
    said = run_side([sys.executable, "-m", module, json.dumps(case)], env={"TOKENIZERS_PARALLELISM": "false"})
    return json.loads(said.strip().splitlines()[-1])


def alternate(pairs: int, *sides: Callable[[], dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """What each side reported in each of `pairs` rounds; in every other round the order is turned round."""
    found: list[list[dict[str, Any]]] = [[] for _ in sides]
    for number in range(pairs):
        order = range(len(sides)) if number % 2 == 0 else reversed(range(len(sides)))
        for side in order:
            found[side].append(sides[side]())
    return found


def samples_per_s(report: Mapping[str, Any], samples_per_step: int) -> float:
    """Over all steps that count."""
    return samples_per_step * len(report["wall_s"]) / sum(report["wall_s"])


def median(values: Sequence[float]) -> float:
    """Middle value."""
    return statistics.median(values)


def setting(name: str, default: int) -> int:
    """A size from the environment: `TRIUNE_BENCH_<NAME>`."""
    return int(os.environ.get(f"TRIUNE_BENCH_{name}", default))


def names(name: str, default: Sequence[str]) -> list[str]:
    """A list from the environment, separated by commas."""
    given = os.environ.get(f"TRIUNE_BENCH_{name}", "")
    return [part.strip() for part in given.split(",") if part.strip()] or list(default)
