"""`triune buffer why|step`: from an entry to the steps that used it, and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import typer

from triune.buffer import open as open_buffer_at
from triune.buffer import to_plain
from triune.buffer.lineage import Lineage, RecordFact, UseFact, parse_identity
from triune.buffer.query_columns import group_of
from triune.cli.buffers import duration, print_json
from triune.cli.screen import table
from triune.errors import ConfigError


def show_why(words: Sequence[str], as_json: bool) -> None:
    """Print the lineage of an entry, a rollout or an experience."""
    if len(words) > 2:
        raise ConfigError("buffer why", f"found {len(words)} words", "[RUN] ID", "put quotes around an id with blanks")
    identity = words[-1]
    run = words[0] if len(words) == 2 else group_of(parse_identity(identity)[0]).run
    with open_buffer_at(run) as buffer:
        found = buffer.why(identity)
    if as_json:
        print_json(to_plain(found))
        return
    typer.echo("\n".join(lineage_lines(found)))


def lineage_lines(found: Lineage) -> list[str]:
    """A lineage for people, in the order in which it happened."""
    row = found.row
    state = f"{row.state} ({row.reason})" if row.reason else row.state
    scope = f"only for run {row.scope}" if row.scope else "for every run"
    rounds = f", made {found.rounds} times" if found.rounds > 1 else ""
    lines = [
        row.entry,
        f"  {state} in buffer {row.buffer}, {scope}; {row.source}, {duration(row.age_s)} old, epoch {row.epoch}",
        f"task {found.task.key} of {found.task.taskset}, visit {found.visit}{rounds}",
        f"  {json.dumps(to_plain(found.task.data), ensure_ascii=False, default=str)}",
        "sampled by",
    ]
    lines += [
        f"  version {fact.version}, published after step {'?' if fact.step is None else fact.step} "
        f"({fact.state}{', weights ' + fact.digest if fact.digest else ''}): {fact.num_tokens} tokens"
        for fact in found.versions
    ] or ["  no policy"]
    lines += ["records", *(line for fact in found.records for line in _record_lines(fact))]
    lines += ["revisions"]
    lines += [
        f"  {fact.revision}: {' → '.join(fact.operators) or ('no operator' if fact.revision else 'as it was put')}, "
        f"{fact.num_bytes} bytes"
        for fact in found.revisions
    ]
    if found.amendments:
        lines += ["amended"]
        for fact in found.amendments:
            made = f" as {fact.made}" if fact.made else ""
            patch = json.dumps(to_plain(fact.patch), ensure_ascii=False, default=str)
            lines.append(f"  by {fact.by} ({fact.key}): {patch}, {fact.outcome}{made}")
    lines += ["used by", *([_use_line(fact) for fact in found.uses] or ["  no step yet"])]
    if found.children:
        lines += ["made of it", *(f"  {name}" for name in found.children)]
    return lines


def _record_lines(fact: RecordFact) -> list[str]:
    reward = "not known yet" if fact.reward is None else f"{fact.reward:g}"
    parts = ", ".join(f"{name} {value:g}" for name, value in fact.reward_parts.items())
    line = (
        f"  {fact.id}: reward {reward}{f' ({parts})' if parts else ''}, {fact.num_actions} of {fact.num_tokens} tokens"
    )
    line += " sampled" if fact.stop else ""
    more = [fact.source, fact.stop] + ([] if fact.is_valid else ["INVALID"])
    lines = [f"{line}, {', '.join(text for text in more if text)}"]
    if fact.num_unknown:
        lines.append(f"    {fact.num_unknown} of them without behaviour log-prob: only imitation learns from these")
    for name in ("operators", "parents", "streams", "tags"):
        if values := getattr(fact, name):
            lines.append(f"    {name}: {', '.join(values)}")
    return lines


def _use_line(fact: UseFact) -> str:
    what = f"use {fact.use_no} of revision {fact.revision} by {fact.consumer}, epoch {fact.epoch}"
    if fact.state == "returned":
        return f"  {what}: returned, no surviving step was trained on it"
    step = "" if fact.step is None else f" step {fact.step}"
    where = f"in checkpoint {fact.checkpoint}" if fact.state == "acked" else "leased, in no checkpoint yet"
    return f"  {what}:{step}, {where}"


def show_step(words: Sequence[str], of: str | None, as_json: bool) -> None:
    """Print what a step was trained on."""
    if len(words) > 2 or not words[-1].isdigit():
        raise ConfigError("buffer step", f"found {' '.join(words)!r}", "[RUN] N, the number of a step", "name the step")
    with open_buffer_at(words[0] if len(words) == 2 else _only_run()) as buffer:
        if not (of or buffer.run):
            raise ConfigError("--of", "missing", "the run whose step it is", "a store may hold several: name one")
        found = buffer.step(int(words[-1]), run=of or "")
    if as_json:
        print_json([to_plain(fact) for fact in found])
        return
    columns = ("entry", "use", "revision", "state", "checkpoint", "epoch")
    rows = [
        (fact.entry, str(fact.use_no), str(fact.revision), fact.state, fact.checkpoint, str(fact.epoch))
        for fact in found
    ]
    table(f"step {words[-1]} of {found[0].consumer} used {len(found)} entries", columns, rows)


def _only_run() -> str:
    """The run under `runs/`, when there is one."""
    there = sorted(path.parent.name for path in Path("runs").glob("*/run.resolved.json"))
    if len(there) != 1:
        found = f"{len(there)} runs under runs/" + (f": {', '.join(there)}" if there else "")
        raise ConfigError("buffer step", found, "a run's name before the step", "write `triune buffer step RUN N`")
    return there[0]
