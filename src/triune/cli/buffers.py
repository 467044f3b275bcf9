"""`triune buffer ls|show|stats|export`: read what a run experienced, also while it runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import typer

from triune.buffer import StoredBuffer, open_buffer, to_plain
from triune.cli.runs import open_run
from triune.cli.screen import table
from triune.errors import ConfigError
from triune.ports import EntryInfo, EntryState
from triune.records import Experience, Group

T = TypeVar("T")


def list_entries(run: str, state: str | None, limit: int, as_json: bool) -> None:
    """Print entries, newest first."""
    _check_state(state)
    found = _with_buffer(run, lambda buffer: buffer.browse(state=state, limit=limit))
    if as_json:
        typer.echo(json.dumps([to_plain(info) for info in found], indent=2))
        return
    table(
        f"newest {len(found)} entries",
        ("entry", "state", "reward", "records", "version", "uses"),
        list(map(_row, found)),
    )


def _row(info: EntryInfo) -> tuple[str, ...]:
    state = f"{info.state} ({info.reason})" if info.reason else str(info.state)
    reward = "" if info.reward is None else f"{info.reward:.3f}"
    return info.entry, state, reward, str(info.num_records), str(info.oldest_version), str(info.uses)


def show_entry(run: str, entry: str | None, as_json: bool) -> None:
    """Print one entry's rollouts."""

    async def read(buffer: StoredBuffer) -> Group:
        if entry is not None:
            return await buffer.read(entry)
        newest = await buffer.browse(limit=1)
        if not newest:
            raise ConfigError(run, "the buffer is empty", "at least one entry", "let the run explore first")
        return await buffer.read(newest[0].entry)

    group = _with_buffer(run, read)
    if as_json:
        typer.echo(json.dumps(to_plain(group), indent=2, ensure_ascii=False))
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


def show_stats(run: str, as_json: bool) -> None:
    """Print counts."""
    stats = _with_buffer(run, lambda buffer: buffer.stats())
    if as_json:
        typer.echo(json.dumps(dict(stats), indent=2))
        return
    table("", ("", ""), [(name, f"{value:g}") for name, value in stats.items()])


def export_entries(run: str, out: Path, state: str | None) -> None:
    """Write entries (`.jsonl`, one group per line) or experiences (`.parquet`, one row each)."""
    _check_state(state)
    if out.suffix not in (".jsonl", ".parquet"):
        raise ConfigError("buffer export", f"found {out.name!r}", "a name that ends in .jsonl or .parquet")
    if not out.parent.is_dir():
        raise ConfigError("buffer export", f"no folder {str(out.parent)!r}", "an existing folder", "make it first")
    number = _with_buffer(run, lambda buffer: _write(buffer, out, state))
    typer.echo(f"{number} {'groups' if out.suffix == '.jsonl' else 'experiences'} written to {out}")


async def _write(buffer: StoredBuffer, out: Path, state: str | None) -> int:
    if out.suffix == ".jsonl" and state is None:
        return await buffer.export_jsonl(out)
    groups = _groups(buffer, state)
    if out.suffix == ".jsonl":
        number = 0
        with out.open("w", encoding="utf-8") as file:
            async for info, group in groups:
                line = {"entry": info.entry, "buffer": info.buffer, "state": info.state, "group": to_plain(group)}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                number += 1
        return number
    return await _write_parquet(groups, out)


async def _groups(buffer: StoredBuffer, state: str | None) -> AsyncIterator[tuple[EntryInfo, Group]]:
    for info in reversed(await buffer.browse(state=state, limit=2**31 - 1)):
        yield info, await buffer.read(info.entry)


async def _write_parquet(groups: AsyncIterator[tuple[EntryInfo, Group]], out: Path) -> int:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    writer, number = None, 0
    try:
        async for info, group in groups:
            rows = [_flat(info, group, record) for record in group.records if isinstance(record, Experience)]
            if not rows:
                continue
            batch = arrow.Table.from_pylist(rows, schema=_schema())
            writer = writer or parquet.ParquetWriter(out, batch.schema)
            writer.write_table(batch)
            number += len(rows)
    finally:
        if writer is not None:
            writer.close()
    if writer is None:
        parquet.write_table(_schema().empty_table(), out)
    return number


def _flat(info: EntryInfo, group: Group, experience: Experience) -> dict[str, Any]:
    """One experience as a row; nested and free parts as JSON text."""
    return {
        "id": str(experience.id),
        "entry": info.entry,
        "state": str(info.state),
        "task": json.dumps(to_plain(group.task.data), ensure_ascii=False),
        "messages": json.dumps(to_plain(experience.messages), ensure_ascii=False),
        "reward": experience.reward,
        "reward_parts": json.dumps(dict(experience.reward_parts)),
        "is_valid": experience.is_valid,
        "stop": str(experience.stop),
        "source": str(experience.source),
        "operators": list(experience.operators),
        "tokens": experience.tokens,
        "action_mask": experience.action_mask,
        "logprobs": experience.logprobs,
        "versions": experience.versions,
        "advantages": experience.advantages,
    }


def _schema() -> Any:
    import pyarrow as arrow

    text, reals = arrow.string(), arrow.list_(arrow.float32())
    fields: dict[str, Any] = {
        **dict.fromkeys(("id", "entry", "state", "task", "messages"), text),
        "reward": arrow.float64(),
        "reward_parts": text,
        "is_valid": arrow.bool_(),
        "stop": text,
        "source": text,
        "operators": arrow.list_(text),
        "tokens": arrow.list_(arrow.int32()),
        "action_mask": arrow.list_(arrow.bool_()),
        "logprobs": reals,
        "versions": arrow.list_(arrow.int32()),
        "advantages": reals,
    }
    return arrow.schema(list(fields.items()))


def _check_state(state: str | None) -> None:
    if state is not None and state not in list(EntryState):
        raise ConfigError("--state", f"found {state!r}", " or ".join(EntryState), "leave it out for all")


def _with_buffer(run: str, work: Callable[[StoredBuffer], Awaitable[T]]) -> T:
    config, folder = open_run(run)
    store: Mapping[str, Any] = config.to_plain()["buffer"]["store"]
    if store["use"] == "memory":
        raise ConfigError(run, "its buffer was only in memory", "buffer.store: sqlite", "nothing is left to look at")
    if store["use"] == "sqlite" and not Path(store["path"] or folder / "buffer.sqlite").is_file():
        raise ConfigError(run, "no buffer.sqlite yet", "a run that has explored", "start it with `triune run`")

    @asynccontextmanager
    async def opened() -> AsyncIterator[StoredBuffer]:
        buffer = open_buffer(config.buffer, folder)
        try:
            yield buffer
        finally:
            await buffer.close()

    async def use() -> T:
        async with opened() as buffer:
            return await work(buffer)

    return asyncio.run(use())
