"""The closing lines of a run: what it reached, where it is, and one rollout before and after."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import typer

from triune.config import RunConfig
from triune.records import Experience, Group

WIDTH = 46
"""Characters of one of the two columns."""

LOOKED_AT = 20_000
"""Entries among which the oldest is looked for; more would take long on a large store."""


def print_closing(summary: Mapping[str, Any], config: RunConfig) -> None:
    """Print what a finished run reached."""
    typer.echo("")
    for line in closing_lines(summary):
        typer.echo(line)
    pair = first_and_last_rollout(config, config.run_dir)
    if pair is not None:
        typer.echo("")
        typer.echo("\n".join(side_by_side(*pair)))


def print_stages(summary: Mapping[str, Any]) -> None:
    """Print what the stages of a finished run reached."""
    typer.echo(f"\n{summary['status']}: {summary['exit_reason']}, {summary['seconds']:.1f} s")
    for entry in summary["stages"]:
        metrics: Mapping[str, Mapping[str, float]] = entry["metrics"]
        name = next((name for name in ("eval/reward", "reward", "loss") if name in metrics), None)
        reached = "" if name is None else f"   {name} {metrics[name]['first']:.3f} → {metrics[name]['last']:.3f}"
        typer.echo(f"{entry['name']:<24}{entry['status']}, {entry.get('steps', 0)} steps{reached}")
    if "export" in summary:
        typer.echo(f"{'exported model':<24}{summary['export']}")


def closing_lines(summary: Mapping[str, Any]) -> list[str]:
    """Status, values before and after, and paths."""
    metrics: Mapping[str, Mapping[str, float]] = summary.get("metrics", {})
    lines = [f"{summary['status']}: {summary['exit_reason']}, {summary['seconds']:.1f} s"]
    shown = [name for name in metrics if name == "reward" or (name.startswith("eval/") and "/mean@" in name)]
    for name in shown:
        if name.endswith(("/low", "/high")):
            continue
        first, last = metrics[name]["first"], metrics[name]["last"]
        steps = f"step {metrics[name]['first_step']:.0f} → {metrics[name]['last_step']:.0f}"
        lines.append(
            f"{name:<24}{_value(metrics, name, 'first', first)} → {_value(metrics, name, 'last', last)}   ({steps})"
        )
    for label, key in (("curve", "curve"), ("exported model", "export")):
        if summary.get(key):
            lines.append(f"{label:<24}{summary[key]}")
    lines += [f"{'note':<24}{note}" for note in summary.get("notes", []) if note.startswith(("alarm", "sink"))][:5]
    return lines


def _value(metrics: Mapping[str, Mapping[str, float]], name: str, which: str, value: float) -> str:
    low, high = metrics.get(f"{name}/low"), metrics.get(f"{name}/high")
    if low is None or high is None:
        return f"{value:.3f}"
    return f"{value:.3f} [{low[which]:.3f}, {high[which]:.3f}]"


def first_and_last_rollout(config: RunConfig, folder: Path) -> tuple[Experience, Experience] | None:
    """The first rollout of the oldest and of the newest group; None when the store is gone or has one group."""
    from triune.buffer import open_buffer

    store = config.to_plain()["buffer"]["store"]
    if store["use"] != "sqlite" or not Path(store["path"] or folder / "buffer.sqlite").is_file():
        return None

    async def read() -> list[Group]:
        buffer = open_buffer(config.buffer, folder)
        try:
            entries = await buffer.browse(limit=LOOKED_AT)
            return [await buffer.read(info.entry, revision=0) for info in (entries[-1:] + entries[:1])]
        finally:
            await buffer.close()

    groups = asyncio.run(read())
    rows = [record for group in groups for record in group.records[:1] if isinstance(record, Experience)]
    return (rows[0], rows[1]) if len(rows) == 2 and rows[0].id != rows[1].id else None


def side_by_side(before: Experience, after: Experience) -> list[str]:
    """Two rollouts in two columns."""
    columns = [_column("before", before), _column("after", after)]
    return [f"{left:<{WIDTH}}  {right}".rstrip() for left, right in zip_longest(*columns, fillvalue="")]


def _column(title: str, experience: Experience) -> list[str]:
    reward = "unknown" if experience.reward is None else f"{experience.reward:g}"
    lines = [f"{title}: version {experience.oldest_version}, reward {reward}"]
    for message in experience.messages:
        text = f"{message.get('role', '?')}: {message.get('content', '')}"
        for part in text.splitlines():
            lines += textwrap.wrap(part, WIDTH - 2, initial_indent="  ", subsequent_indent="    ") or [""]
    return lines
