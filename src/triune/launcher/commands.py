"""What the commands `run`, `explore`, `train`, `bench` and `export` do once their configuration is read."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from triune.config import RunConfig
from triune.errors import CheckpointError, ConfigError
from triune.launcher.explorer_side import load_tokenizer
from triune.launcher.folder import Start
from triune.launcher.local import launch
from triune.launcher.measure import bench_endpoint_of, bench_run
from triune.launcher.request import Request
from triune.launcher.trainer_side import find_checkpoints, load_policy
from triune.models import export_model, resolve_model

BOTH = ("explorer", "trainer")


def run(config: RunConfig, run_dir: Path, *, resume: bool, restart: bool, allow_changes: bool) -> dict[str, Any]:
    """Explore and train in this process; returns the summary."""
    return launch(_request(config, BOTH, resume, restart, allow_changes))


def train(config: RunConfig, run_dir: Path, *, resume: bool, restart: bool, allow_changes: bool) -> dict[str, Any]:
    """Only train; returns the summary."""
    return launch(_request(config, ("trainer",), resume, restart, allow_changes))


def explore(config: RunConfig, run_dir: Path) -> dict[str, Any]:
    """Only explore, beside a trainer; returns the summary."""
    return launch(Request(config=config, roles=("explorer",), start=Start.RESUME))


def _request(config: RunConfig, roles: tuple[str, ...], resume: bool, restart: bool, allow_changes: bool) -> Request:
    start = Start.RESUME if resume else Start.RESTART if restart else Start.NEW
    return Request(config=config, roles=roles, start=start, allow_changes=allow_changes)


def bench(config: RunConfig, run_dir: Path, *, endpoint: str | None) -> list[dict[str, Any]]:
    """Measure all checkpoints of a run, or the model behind an endpoint; returns one row per task set of each."""
    if endpoint is not None:
        return asyncio.run(bench_endpoint_of(config, endpoint))
    return asyncio.run(bench_run(config, run_dir))


def export(config: RunConfig, run_dir: Path, *, step: int | None, out: Path | None) -> Path:
    """Write a checkpoint as a Hugging Face folder and return it.

    Raises:
        CheckpointError: There is no checkpoint of that step.
        ConfigError: `out` holds something already: only the run's own `export/` is ever replaced.
    """
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError("--out", f"{out} exists and is not empty", "a new folder", "name another one")
    checkpoints = find_checkpoints(config, run_dir)
    steps = checkpoints.steps()
    chosen = (steps[-1] if steps else None) if step is None else step
    if chosen is None or chosen not in steps:
        there = f"one of the steps {', '.join(map(str, steps))}" if steps else "a run that has saved one"
        found = "no complete checkpoint" if step is None else f"no complete checkpoint of step {step}"
        raise CheckpointError(str(checkpoints.folder), found, there)
    policy = load_policy(config)
    _, weights, _ = checkpoints.load(checkpoints.path(chosen))
    policy.load(weights)
    tokenizer = load_tokenizer(config, resolve_model(config.model.path).location)
    target = out.resolve() if out is not None else run_dir / "export"
    return export_model(policy.model, target, tokenizer=tokenizer.hf, source_name=config.model.path)
