"""`triune check`."""

from __future__ import annotations

import json
from typing import Any

import typer

from triune.cli.screen import table
from triune.config import config_hash, consumption, load_config
from triune.config.plain import leaves


def check(file: str, overrides: list[str] | None, as_json: bool) -> None:
    """Print a resolved configuration and what a step of it consumes; raises ConfigError when it cannot be run."""
    config = load_config(file, overrides or [])
    plain, step = config.to_plain(), consumption(config)
    if as_json:
        figures: dict[str, Any] = {name: getattr(step, name) for name in step.__struct_fields__}
        content = {"config": plain, "origins": config.origins, "step": figures, "config_hash": config_hash(config)}
        typer.echo(json.dumps(content, indent=2))
        return
    rows = [(path, json.dumps(value, ensure_ascii=False), config.origins[path]) for path, value in leaves(plain)]
    table(f"{file}: resolved", ("key", "value", "from"), rows)
    typer.echo("\nwhat a step consumes")
    for line in step.lines():
        typer.echo(f"  {line}")
    typer.echo(f"\nrun folder {config.run_dir}, configuration {config_hash(config)}: valid")
