"""`triune buffer export|import|gc|verify`: move experience, delete it, look for damage."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from triune.buffer import open as open_buffer_at
from triune.buffer import to_plain
from triune.buffer.export import Exported
from triune.buffer.imports import Reader, import_file
from triune.buffer.incoming import FORMATS
from triune.buffer.notebook import find_path, verify_at
from triune.buffer.query import conjunction, equals
from triune.buffer.query_parser import parse_filter
from triune.buffer.redaction import Deleted, delete
from triune.buffer.segments_gc import Reclaimed, reclaim
from triune.cli.buffers import check_state, print_json
from triune.errors import ConfigError, TaskError
from triune.records import GroupId, Record, Source, Task


def export_from(run: str, out: Path, state: str | None, where: str | None, as_json: bool) -> None:
    """Write entries to a file or a dataset folder; leaves with exit code 1 when there are none."""
    check_state(state)
    wanted = conjunction(parse_filter(where), *([equals("state", state)] if state else []))
    with open_buffer_at(run) as buffer:
        found = buffer.export(out, wanted.text)
    if as_json:
        print_json(to_plain(found))
    else:
        typer.echo("\n".join(_exported_lines(found, wanted.text)))
    if not found.num_entries:
        raise typer.Exit(1)


def _exported_lines(found: Exported, text: str) -> list[str]:
    groups = found.num_entries
    what = f"{groups} groups" if found.kind == "jsonl" else f"{found.num_rows} experiences of {groups} groups"
    lines = [f"{what} written to {found.path}, manifest {found.manifest}"]
    if found.num_without_behaviour:
        lines.append(f"{found.num_without_behaviour} without behaviour log-probs: only imitation can learn from them")
    if not groups:
        lines.append(f"nothing fits {text!r}: try it with `triune buffer query`" if text else "the buffer is empty")
    return lines


def import_into(
    run: str,
    file: Path,
    into: str,
    format: str | None,
    model: str | None,
    where: str | None,
    tags: Sequence[str],
    rejects: Path | None,
    as_json: bool,
) -> None:
    """Take a file's rows into a named buffer; leaves with exit code 1 when some were refused, or there are none."""
    if format is not None and format not in FORMATS:
        raise ConfigError("--format", f"found {format!r}", f"one of {', '.join(FORMATS)}", "leave it out to detect it")
    wanted = parse_filter(where)
    with open_buffer_at(run, makes=True) as buffer:
        found = import_file(
            buffer.store,
            file,
            into=into,
            reader=_text_reader(run, model),
            format=format,  # type: ignore[arg-type]
            wanted=wanted,
            tags=tags,
            rejects=rejects,
        )
    if as_json:
        print_json(to_plain(found))
    else:
        typer.echo(
            f"{found.num_entries} entries in {file}: {found.num_new} new in buffer {into}, {found.num_duplicate} "
            f"duplicate, {found.num_filtered} filtered out, {found.num_refused} refused"
        )
        for reason, number in found.reasons.items():
            typer.echo(f"  {number} x {reason}, first in {found.first[reason]}")
        if found.num_without_behaviour:
            typer.echo(
                f"{found.num_without_behaviour} of {found.num_sequences} new sequences have no behaviour log-probs: "
                "they enter no ratio, only imitation and preference losses learn from them"
            )
        if found.rejects:
            typer.echo(f"refused rows are in {found.rejects}")
        if not found.num_entries:
            typer.echo("the file has no rows")
    if found.num_refused or not found.num_entries:
        raise typer.Exit(1)


def _text_reader(run: str, model: str | None) -> Reader:
    """Reads rows of text with the tokenizer of a model, which is loaded with the first of them."""
    readers: dict[str, Any] = {}

    def read(format: str, group: GroupId, task: Task) -> Sequence[Record]:
        reads = "pairs" if format == "pairs" else "answers"
        if not readers:
            readers.update(_row_readers(run, model))
        try:
            return readers[reads](group, task)
        except TaskError:
            raise
        except Exception as error:  # a template is a program of the model's authors, and may raise anything
            raise TaskError(
                str(group), f"the chat template refuses it ({error})", "messages that it can show"
            ) from error

    return read


def _row_readers(run: str, model: str | None) -> dict[str, Any]:
    from triune.explorer.row_reader import RowReader
    from triune.models import ChatTokenizer, ModelSettings, max_positions, resolve_model

    settings = _model_of(run) if model is None else ModelSettings(path=model)
    tokenizer = ChatTokenizer.load(
        resolve_model(settings.path, "--model").location,
        template=settings.chat_template,
        trust_remote_code=settings.trust_remote_code,
    )
    longest = max_positions(settings) or 1 << 20
    return {
        reads: RowReader(tokenizer=tokenizer, prompt_of=_no_question, reads=reads, max_tokens=longest)
        for reads in ("answers", "pairs")
    }


def _model_of(run: str) -> Any:
    """Settings of the run's model.

    Raises:
        ConfigError: A store was named, not a run.
    """
    from triune.config import load_config

    folder = None if "://" in run or run.endswith(".sqlite") else find_path(run)
    if folder is None or not (folder / "run.resolved.json").is_file():
        do = "name the model whose tokenizer reads text, or the run's folder in place of its store"
        raise ConfigError("--model", "missing, and a store has no model of its own", "a model or a run", do)
    return load_config(folder).model


def _no_question(task: Task) -> list[Any]:
    raise TaskError("row", f"no `prompt` (it has {', '.join(task.data)})", "a prompt, or whole conversations")


def delete_from(
    run: str,
    task: str | None,
    source: str | None,
    user: str | None,
    user_field: str,
    where: str | None,
    by: str,
    *,
    segments: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Delete what entries hold, or say what that would be; leaves with exit code 1 when some is left."""
    if source is not None and source not in list(Source):
        raise ConfigError("--source", f"found {source!r}", " or ".join(Source))
    columns = {"task_key": task, "source": source, f"data.{user_field}": user}
    given = [equals(column, value) for column, value in columns.items() if value is not None]
    wanted = conjunction(parse_filter(where), *given)
    if not wanted.text and not segments:
        found, expected = "nothing says what to delete", "--task, --source, --user or --where, or --segments"
        raise ConfigError("buffer gc", found, expected, "for everything write --where \"entry LIKE '%'\"")
    if dry_run == yes:
        found = "both --dry-run and --yes" if yes else "neither --dry-run nor --yes"
        raise ConfigError("buffer gc", found, "one of them", "look with --dry-run, then delete with --yes")
    with open_buffer_at(run) as buffer:
        if wanted.text:
            result = delete(buffer.store, wanted, by=by, is_dry=dry_run)
        else:
            cleared = reclaim(buffer.store, is_dry=dry_run)
            result = Deleted(num_entries=0, states={}, sources={}, num_leased=0, segments=cleared)
    if as_json:
        print_json({**to_plain(result), "is_dry_run": dry_run, "filter": wanted.text})
    elif not wanted.text:
        nothing = [f"every byte of {result.segments.num_segments} segments is referred to or overwritten"]
        typer.echo("\n".join(_segment_lines(result.segments, dry_run) or nothing))
    else:
        typer.echo("\n".join(_deleted_lines(result, dry_run)))
    if (result.num_leased or result.left_in) and not dry_run:
        raise typer.Exit(1)


def _deleted_lines(result: Deleted, is_dry: bool) -> list[str]:
    counts = ", ".join(f"{number} {name}" for name, number in {**result.states, **result.sources}.items())
    verb = "would be deleted" if is_dry else "deleted"
    lines = [f"{result.num_entries} entries {verb}" + (f" ({counts})" if counts else "")]
    lines += [f"  {entry}" for entry in result.examples]
    if result.num_entries > len(result.examples):
        lines.append(f"  … and {result.num_entries - len(result.examples)} more")
    lines += [f"{number} deleted entries are in the export of {name}" for name, number in result.manifests.items()]
    lines += [f"an export is no longer where it was written: {name}; note it there" for name in result.lost_manifests]
    lines += [
        f"an export is being written, and marks it at its end, or was cut off: {name}"
        for name in result.unfinished_manifests
    ]
    lines += _segment_lines(result.segments, is_dry)
    if result.left_in:
        lines.append(
            f"their bytes are still in {result.left_in}: somebody reads the store as it was; try again when they ended"
        )
    if result.num_leased:
        lines.append(f"{result.num_leased} entries are leased and stay: try again after the next checkpoint")
    return lines


def _segment_lines(done: Reclaimed, is_dry: bool) -> list[str]:
    if not done.num_bytes and not done.num_removed:
        return []
    counts = f"{done.num_removed} removed, {done.num_compacted} written anew, {done.num_wiped} overwritten in part"
    verb = "would go" if is_dry else "are gone"
    return [f"{done.num_bytes} unreferenced bytes of {done.num_segments} segments {verb} ({counts})"]


def verify_store(run: str, as_json: bool) -> None:
    """Print everything that is wrong; leaves with exit code 1 when something is."""
    found = verify_at(run)
    if as_json:
        print_json(to_plain(found))
    else:
        size = f"{found.num_bytes / 2**20:.1f} MiB"
        typer.echo(f"{found.where}: {found.num_entries} entries, {found.num_blobs} blobs, {size} read")
        if found.segments:
            dead = f"{found.num_unreferenced_bytes} bytes unreferenced"
            typer.echo(f"{found.segments}: {found.num_segments} segments, {dead}")
        for finding in found.findings:
            name = f" {finding.entry}" if finding.entry else ""
            typer.echo(f"  {finding.check}{name}: {finding.found}\n    do: {finding.do}")
        typer.echo(f"{len(found.findings)} findings" if found.findings else "everything is as it should be")
    if found.findings:
        raise typer.Exit(1)
