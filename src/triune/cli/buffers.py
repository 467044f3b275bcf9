"""`triune buffer ls|show|query`: read what a run experienced, also while it runs."""

from __future__ import annotations

import json
from typing import Any

import typer

from triune.buffer import open as open_buffer_at
from triune.buffer import to_plain
from triune.buffer.entry_walk import count_that_fit
from triune.buffer.query_columns import EntryRow
from triune.buffer.query_parser import parse_filter
from triune.cli.screen import table
from triune.errors import ConfigError
from triune.ports import EntryInfo, EntryState
from triune.records import Experience


def list_entries(run: str, state: str | None, limit: int, as_json: bool) -> None:
    """Print entries, newest first."""
    check_state(state)
    with open_buffer_at(run) as buffer, buffer.store.db.transaction(looks=True):
        found = buffer.store.entries.browse(None, state, limit)
    if as_json:
        print_json([to_plain(info) for info in found])
        return
    columns = ("entry", "state", "reward", "records", "version", "uses")
    table(f"newest {len(found)} entries", columns, list(map(_cells, found)))


def _cells(info: EntryInfo) -> tuple[str, ...]:
    state = f"{info.state} ({info.reason})" if info.reason else str(info.state)
    reward = "" if info.reward is None else f"{info.reward:.3f}"
    return info.entry, state, reward, str(info.num_records), str(info.oldest_version), str(info.uses)


def query_entries(run: str, where: str, limit: int, count: bool, as_json: bool) -> None:
    """Print the newest entries that fit a filter, or how many fit."""
    wanted = parse_filter(where)
    with open_buffer_at(run) as buffer:
        if count:
            number = count_that_fit(buffer.store, wanted)
            typer.echo(json.dumps({"num_entries": number}) if as_json else f"{number} entries")
            return
        found = buffer.query(where, limit=limit)
    if as_json:
        print_json([to_plain(row) for row in found])
        return
    columns = ("entry", "state", "reward", "source", "records", "version", "staleness", "uses", "age")
    table(f"newest {len(found)} entries that fit", columns, list(map(_row_cells, found)))


def _row_cells(row: EntryRow) -> tuple[str, ...]:
    state = f"{row.state} ({row.reason})" if row.reason else row.state
    reward = "" if row.reward is None else f"{row.reward:.3f}"
    numbers = (row.num_records, row.version, row.staleness, row.uses)
    return row.entry, state, reward, row.source, *map(str, numbers), duration(row.age_s)


def duration(seconds: float) -> str:
    """`42s`, `3.5m`, `2.0h`, `9.1d`."""
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "m")):
        if seconds >= size:
            return f"{seconds / size:.1f}{unit}"
    return f"{seconds:.0f}s"


def show_entry(run: str, entry: str | None, as_json: bool) -> None:
    """Print one entry's rollouts."""
    with open_buffer_at(run) as buffer:
        if entry is None:
            newest = buffer.query("state != evicted", limit=1)
            if not newest:
                raise ConfigError(run, "the buffer is empty", "at least one entry", "let the run explore first")
            entry = newest[0].entry
        group = buffer.read(entry)
    if as_json:
        print_json(to_plain(group))
        return
    typer.echo(f"{group.id}\ntask  {json.dumps(dict(group.task.data), ensure_ascii=False, default=str)}")
    for record in group.records:
        typer.echo("")
        typer.echo("\n".join(experience_lines(record)) if isinstance(record, Experience) else str(to_plain(record)))


def experience_lines(experience: Experience) -> list[str]:
    """One experience for people: how it went, then what was said."""
    reward = "not known yet" if experience.reward is None else f"{experience.reward:g}"
    parts = ", ".join(f"{name} {value:g}" for name, value in experience.reward_parts.items())
    facts = [
        f"rollout {experience.id.rollout.member}.{experience.id.rollout.attempt}",
        f"reward {reward}" + (f" ({parts})" if parts else ""),
        f"{len(experience)} tokens, {experience.num_actions} sampled",
        f"version {experience.oldest_version}",
        f"stop {experience.stop}",
    ]
    if not experience.is_valid:
        facts.append("INVALID")
    if experience.advantages is not None and experience.num_actions:
        facts.append(f"advantage {float(experience.advantages[experience.action_mask].mean()):+.3f}")
    lines = ["  ".join(facts)]
    for message in experience.messages:
        lines.append(f"  {message.get('role', '?')}: {message.get('content', '')}")
    return lines


def check_state(state: str | None) -> None:
    """Raise ConfigError for a state that there is not."""
    if state is not None and state not in list(EntryState):
        raise ConfigError("--state", f"found {state!r}", " or ".join(EntryState), "leave it out for all")


def print_json(value: Any) -> None:
    """For programs; what is no JSON becomes text."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))
