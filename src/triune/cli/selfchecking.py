"""`triune selfcheck`."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from triune.cli.screen import table
from triune.config import RunConfig, StagedConfig, load_run_file

if TYPE_CHECKING:
    from triune.selfcheck import Finding, Report

WIDTH = 110
"""Characters of a line of causes and fixes."""


def selfcheck(file: str, overrides: list[str] | None, only: list[str], out: Path | None, as_json: bool) -> None:
    """Check a run file on its own model, workflow and reward; exit code 1 when something is wrong.

    Of a file with stages every one is checked whose weights are there: all, once the stages before it have run.

    Raises:
        ConfigError: The configuration cannot be run, or no check has such a name.
        TriuneError: The run could not begin.
    """
    config = load_run_file(file, overrides or [])
    reports: list[Report] = []
    for stage in config.stages if isinstance(config, StagedConfig) else (config,):
        if reports and not Path(stage.model.path).exists():
            typer.echo(f"\n{stage.name} is not checked: its weights come from the stage before it", err=as_json)
            continue
        path = out or default_path(stage)
        if out is not None and isinstance(config, StagedConfig):
            path = out.with_stem(f"{out.stem}-{stage.name}")
        reports.append(_check(stage, only, path, as_json))
    if as_json:
        plain = [json.loads(report.to_json()) for report in reports]
        typer.echo(json.dumps({"stages": plain} if isinstance(config, StagedConfig) else plain[0], indent=2))
    if not all(report.is_right for report in reports):
        raise typer.Exit(1)


def _check(config: RunConfig, only: list[str], path: Path, as_json: bool) -> Report:
    from triune.selfcheck import selfcheck as run_checks

    with _progress(as_json) as tell:
        report = run_checks(config, only=only, tell=tell)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(report.to_json())
    if not as_json:
        _print(report, path)
    return report


def default_path(config: RunConfig) -> Path:
    """`<runs_dir>/<name>.selfcheck.json`, beside the run's folder, which is not touched."""
    return config.run_dir.with_name(f"{config.name}.selfcheck.json")


@contextmanager
def _progress(as_json: bool) -> Iterator[Callable[[str], None]]:
    """Show what is being checked, where somebody looks."""
    if as_json or not sys.stderr.isatty():
        yield lambda name: None
        return
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield lambda name: status.update(name.replace("_", " "))


def _print(report: Report, path: Path) -> None:
    rows = [(one.status.value, one.name, said_of(one), f"{one.seconds:.1f} s") for one in report.findings]
    table(f"{report.name}: {report.model}", ("", "check", "found", "time"), rows)
    for one in report.findings:
        if one.fix:
            typer.echo("\n".join(["", *lines_of(one)]))
    counts = {status: len(report.of(status)) for status in dict.fromkeys(one.status for one in report.findings)}
    said = ", ".join(f"{num} {status.value}" for status, num in counts.items())
    typer.echo(f"\n{said} in {report.seconds:.1f} s; {path}")


def said_of(finding: Finding) -> str:
    """What was found, in one cell."""
    return f"because {finding.found}" if finding.status.value == "skipped" else finding.found


def lines_of(finding: Finding) -> list[str]:
    """What does not hold, why, and what to do."""
    head = f"{finding.status.value} {finding.name}: {finding.proves}?"
    lines = [head]
    for label, text in (("cause", finding.found), ("do", finding.fix)):
        lines += textwrap.wrap(f"{label}: {text}", WIDTH, initial_indent="  ", subsequent_indent="    ")
    return lines
