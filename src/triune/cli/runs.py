"""`triune run`, `explore`, `train`, `bench` and `export`: configuration in, launcher out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from triune.cli.closing import print_closing, print_stages
from triune.cli.screen import table
from triune.config import RunConfig, StagedConfig, load_config, load_run_file
from triune.errors import ConfigError


def start(
    command: str, file: str, overrides: list[str] | None, *, resume: bool, restart: bool, allow_changes: bool
) -> None:
    """Load the configuration and hand it to the launcher.

    Raises:
        ConfigError: The configuration cannot be run, or `--resume` and `--restart` were both given.
    """
    check_one_start(resume, restart)
    config = load_run_file(file, overrides or []) if command == "run" else load_config(file, overrides or [])
    from triune import launcher

    if isinstance(config, StagedConfig):
        begin = launcher.Start.RESUME if resume else launcher.Start.RESTART if restart else launcher.Start.NEW
        print_stages(launcher.run_stages(config, start=begin, allow_changes=allow_changes, say=typer.echo))
        return
    if command == "explore":
        launcher.explore(config, config.run_dir)
        return
    roles = launcher.run if command == "run" else launcher.train
    summary = roles(config, config.run_dir, resume=resume, restart=restart, allow_changes=allow_changes)
    print_closing(summary, config)


def check_one_start(resume: bool, restart: bool) -> None:
    """Refuse `--resume` together with `--restart`."""
    if resume and restart:
        raise ConfigError("--resume --restart", "both were given", "one of them", "drop one")


def bench(file: str, overrides: list[str] | None, endpoint: str | None, as_json: bool) -> None:
    """Measure checkpoints or an endpoint.

    Raises:
        ConfigError: No evaluation tasks, or no such endpoint.
    """
    config = load_config(_as_run(file), overrides or [])
    if config.eval.tasks is None:
        raise ConfigError("eval.tasks", "missing", "tasks to measure on", "write `eval: {tasks: {use: …}}`")
    if endpoint is not None and endpoint not in config.models:
        known = ", ".join(config.models) or "none"
        raise ConfigError("--endpoint", f"no model is called {endpoint!r}", f"one under `models:` ({known})")
    from triune import launcher

    rows = launcher.bench(config, config.run_dir, endpoint=endpoint)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    names = list(dict.fromkeys(name for row in rows for name in row))
    table("", names, [tuple(_cell(row.get(name)) for name in names) for row in rows])


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def export(run: str, step: int | None, out: Path | None) -> None:
    """Write a checkpoint as a Hugging Face folder and say where."""
    config, folder = open_run(run)
    from triune import launcher

    written: Any = launcher.export(config, folder, step=step, out=out)
    typer.echo(str(written))


def open_run(run: str) -> tuple[RunConfig, Path]:
    """Configuration and folder of an existing run, by folder or by name.

    Raises:
        ConfigError: No such run; names those that are there.
    """
    folder = Path(_as_run(run))
    if not (folder / "run.resolved.json").is_file():
        there = sorted(path.parent.name for path in Path("runs").glob("*/run.resolved.json"))
        known = f"one of {', '.join(there)}, or a run's folder" if there else "the folder of a run"
        raise ConfigError(run, "no run here", known, "start one with `triune run FILE`")
    return load_config(folder), folder


def _as_run(run: str) -> str:
    """`quickstart` → `runs/quickstart` when that is there and `quickstart` is not."""
    return run if Path(run).exists() or not (Path("runs") / run).is_dir() else str(Path("runs") / run)
