"""`triune compare`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from triune.cli.runs import check_one_start
from triune.cli.screen import table
from triune.errors import ConfigError, RunFailed


def compare(
    words: Sequence[str],
    seeds: int,
    metric: str | None,
    out: Path | None,
    *,
    resume: bool,
    restart: bool,
    as_json: bool,
) -> None:
    """Run the variants and print their table.

    Raises:
        ConfigError: No file was named, or a file cannot be run.
        RunFailed: A variant failed; the table was printed before.
    """
    check_one_start(resume, restart)
    files = [word for word in words if "=" not in word or Path(word).exists()]
    if not files:
        raise ConfigError("triune compare", "no run file was named", "one per variant", "write `triune compare A B`")
    from triune import launcher

    report = launcher.compare_variants(
        files,
        seeds=seeds,
        overrides=[word for word in words if word not in files],
        metric=metric,
        out=out,
        start=launcher.Start.RESUME if resume else launcher.Start.RESTART if restart else launcher.Start.NEW,
        say=typer.echo,
    )
    print_comparison(report)
    if as_json:
        typer.echo(json.dumps(report))
    failed = [row for row in report["variants"] if row["status"] == "failed"]
    if failed:
        texts = [f"{row['name']} with seed {seed}: {text}" for row in failed for seed, text in row["errors"].items()]
        raise RunFailed(
            f"variant {', '.join(row['name'] for row in failed)}",
            "\n".join(texts),
            "",
            f"correct the cause, then go on with --resume --out {report['folder']}",
        )


def print_comparison(report: Mapping[str, Any]) -> None:
    """One line per variant, and where the rest is."""
    first = report["variants"][0]["name"]
    columns = ("variant", "seeds", "initial", "final", "difference", f"against {first}", "wall-clock", "samples")
    typer.echo(f"\n{report['metric']}: mean over seeds [95 % interval]")
    table("", columns, [_cells(row, report) for row in report["variants"]])
    if report["picture"] is not None:
        typer.echo(f"{'picture':<10}{report['picture']}")
    typer.echo(f"{'numbers':<10}{Path(report['folder']) / 'compare.json'}")


def _cells(row: Mapping[str, Any], report: Mapping[str, Any]) -> tuple[str, ...]:
    name = row["name"] if row["status"] == "finished" else f"{row['name']} ({row['status']})"
    return (
        name,
        f"{len(row['seeds'])} of {len(report['seeds'])}",
        _estimate(row["initial"]),
        _estimate(row["final"]),
        _estimate(row["difference"], "+"),
        _estimate(row["against_first"], "+"),
        "" if row["seconds"] is None else f"{row['seconds']:.1f} s",
        "" if row["samples"] is None else str(row["samples"]),
    )


def _estimate(value: Mapping[str, Any] | None, sign: str = "") -> str:
    if value is None:
        return ""
    if value["low"] is None:
        return f"{value['mean']:{sign}.3f}"
    return f"{value['mean']:{sign}.3f} [{value['low']:{sign}.3f}, {value['high']:{sign}.3f}]"
