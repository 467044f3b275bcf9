"""`triune check`."""

from __future__ import annotations

import json
from typing import Any

import typer

from triune.cli.screen import table
from triune.config import RunConfig, StagedConfig, config_hash, consumption, load_run_file, stage_name
from triune.config.plain import leaves


def check(file: str, overrides: list[str] | None, as_json: bool) -> None:
    """Print a resolved configuration and what a step of it consumes; raises ConfigError when it cannot be run."""
    config = load_run_file(file, overrides or [])
    if isinstance(config, StagedConfig):
        if as_json:
            stages = [{"name": stage.name, **_content(stage)} for stage in config.stages]
            typer.echo(json.dumps({"name": config.name, "run_dir": str(config.run_dir), "stages": stages}, indent=2))
            return
        for number, stage in enumerate(config.stages):
            _print(stage, f"{file}: stage {number + 1} of {len(config.stages)}, {stage_name(stage)}")
            typer.echo("")
        typer.echo(f"run folder {config.run_dir}, {len(config.stages)} stages: valid")
    elif as_json:
        typer.echo(json.dumps(_content(config), indent=2))
    else:
        _print(config, f"{file}: resolved")


def _content(config: RunConfig) -> dict[str, Any]:
    step = consumption(config)
    figures: dict[str, Any] = {name: getattr(step, name) for name in step.__struct_fields__}
    return {
        "config": config.to_plain(),
        "origins": config.origins,
        "step": figures,
        "config_hash": config_hash(config),
    }


def _print(config: RunConfig, title: str) -> None:
    plain = leaves(config.to_plain())
    rows = [(path, json.dumps(value, ensure_ascii=False), config.origins[path]) for path, value in plain]
    table(title, ("key", "value", "from"), rows)
    typer.echo("\nwhat a step consumes")
    for line in consumption(config).lines():
        typer.echo(f"  {line}")
    typer.echo(f"\nrun folder {config.run_dir}, configuration {config_hash(config)}: valid")
