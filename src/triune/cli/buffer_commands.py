"""`triune buffer …`: the commands and their help texts; what they do is in the modules beside this one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

buffer_app = typer.Typer(
    no_args_is_help=True,
    help="Look at what a run experienced, follow it, move it, delete it; also while the run goes on.",
    rich_markup_mode="markdown",
)

Run = Annotated[
    str, typer.Argument(metavar="RUN", help="Folder of a run, its name under `runs/`, a store's file or address.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Where = Annotated[
    str | None, typer.Option("--where", metavar="FILTER", help="Only entries that fit; see `triune buffer query`.")
]
State = Annotated[str | None, typer.Option(help="Only entries in this state: ready, spent, dropped, …")]


@buffer_app.command("ls")
def buffer_ls(
    run: Run,
    state: State = None,
    limit: Annotated[int, typer.Option(min=1, help="How many, newest first.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List entries (groups of rollouts), newest first.

    **Example**

    `triune buffer ls quickstart --state dropped`
    """
    from triune.cli.buffers import list_entries

    list_entries(run, state, limit, as_json)


@buffer_app.command("show")
def buffer_show(
    run: Run,
    entry: Annotated[str | None, typer.Argument(help="Entry id as `ls` prints it; default: the newest.")] = None,
    as_json: AsJson = False,
) -> None:
    """Read one entry: each rollout's messages, reward and parts, versions, how it ended.

    **Example**

    `triune buffer show quickstart`
    """
    from triune.cli.buffers import show_entry

    show_entry(run, entry, as_json)


@buffer_app.command("stats")
def buffer_stats(run: Run, as_json: AsJson = False) -> None:
    """Count entries by buffer and state; draw age, staleness and the rewards of each source.

    **Example**

    `triune buffer stats quickstart`
    """
    from triune.cli.buffer_stats import show_stats

    show_stats(run, as_json)


@buffer_app.command("why")
def buffer_why(
    words: Annotated[
        list[str],
        typer.Argument(metavar="[RUN] ID", help="Id of an entry, a rollout or an experience; it names its run itself."),
    ],
    as_json: AsJson = False,
) -> None:
    """Say where an entry came from and where it went.

    Its task and row, the weights that sampled it, its reward and parts, operators, people's amendments, and the steps
    that were trained on it, with their checkpoints.

    **Examples**

    `triune buffer why quickstart/train/17/0`

    `triune buffer why runs/other quickstart/train/17/0/3.0 --json`
    """
    from triune.cli.buffer_lineage import show_why

    show_why(words, as_json)


@buffer_app.command("step")
def buffer_step(
    words: Annotated[
        list[str],
        typer.Argument(metavar="[RUN] N", help="Number of a trainer step, from 1; RUN where there are several."),
    ],
    of: Annotated[str | None, typer.Option("--of", help="Run whose step it is, when the store holds several.")] = None,
    as_json: AsJson = False,
) -> None:
    """List what a trainer step was trained on: entries, use numbers, revisions.

    **Example**

    `triune buffer step quickstart 12`
    """
    from triune.cli.buffer_lineage import show_step

    show_step(words, of, as_json)


@buffer_app.command("query")
def buffer_query(
    run: Run,
    where: Annotated[str, typer.Argument(metavar="FILTER", help="Like the WHERE of an SQL query.")],
    limit: Annotated[int, typer.Option(min=1, help="How many, newest first.")] = 50,
    count: Annotated[bool, typer.Option("--count", help="Only count all that fit.")] = False,
    as_json: AsJson = False,
) -> None:
    """Find entries by a filter over their columns: `=` `!=` `<` `<=` `>` `>=` IN LIKE BETWEEN IS NULL AND OR NOT.

    Columns: `entry run taskset task_key buffer scope state reason source reward priority urgent num_records version
    newest_version revision epoch staleness age uses leased tags operators stop num_tokens`, and `data.NAME` for a field
    of the task's row. `age` takes `90s`, `15m`, `2h`, `7d`. Text needs quotes unless it is one word.

    **Examples**

    `triune buffer query quickstart "state = ready AND reward BETWEEN 0.2 AND 0.8 AND staleness <= 2"`

    `triune buffer query quickstart "source IN (human, expert) OR tags = gold OR data.question LIKE '%+7%'" --count`
    """
    from triune.cli.buffers import query_entries

    query_entries(run, where, limit, count, as_json)


@buffer_app.command("export")
def buffer_export(
    run: Run,
    out: Annotated[
        Path, typer.Argument(help="`.jsonl` or `.parquet` file; a name without ending makes a dataset folder.")
    ],
    state: State = None,
    where: Where = None,
    as_json: AsJson = False,
) -> None:
    """Write entries with tokens, messages, rewards and lineage to a file or a Hugging Face dataset folder.

    A manifest beside it says what it holds, of which runs, under which filter, with content hashes; a later
    `triune buffer gc` notes in it what was deleted.

    **Examples**

    `triune buffer export quickstart experience.parquet --state spent`

    `triune buffer export quickstart best --where "reward > 0.9"`
    """
    from triune.cli.buffer_assets import export_from

    export_from(run, out, state, where, as_json)


@buffer_app.command("import")
def buffer_import(
    run: Run,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="`.jsonl`, `.json`, `.parquet`, `.arrow`, or a dataset's folder.")
    ],
    into: Annotated[
        str, typer.Option("--into", help="Named buffer to put it into; every run of the store may use it.")
    ],
    format: Annotated[
        str | None, typer.Option(help="entries, chat, sharegpt or pairs; default: by the fields of each row.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Whose tokenizer and template read text; default: the run's model.")
    ] = None,
    where: Where = None,
    tag: Annotated[list[str] | None, typer.Option(help="Tag for every record; may be given several times.")] = None,
    rejects: Annotated[Path | None, typer.Option(help="File for refused rows; default: `FILE.rejects.jsonl`.")] = None,
    as_json: AsJson = False,
) -> None:
    """Take experience of other runs and tools into a named buffer, each once.

    Reads what `triune buffer export` writes, chats (`messages`), ShareGPT (`conversations`) and preference pairs
    (`prompt`, `chosen`, `rejected`). Refused rows are written to a file with their reasons, and make the exit code 1.
    Sequences without behaviour log-probs enter no ratio: only imitation and preference losses learn from them.

    RUN may be a new file that ends in `.sqlite`: a later run trains on it with `buffer.store.path`.

    **Examples**

    `triune buffer import past.sqlite experience.parquet --into past --where "reward > 0.5"`

    `triune buffer import runs/next chats.jsonl --into expert --tag support`
    """
    from triune.cli.buffer_assets import import_into

    import_into(run, file, into, format, model, where, tag or [], rejects, as_json)


@buffer_app.command("gc")
def buffer_gc(
    run: Run,
    task: Annotated[str | None, typer.Option(help="Entries of the task of this key.")] = None,
    source: Annotated[str | None, typer.Option(help="Entries of this source: human, expert, imported, …")] = None,
    user: Annotated[str | None, typer.Option(help="Entries whose task's row has this user.")] = None,
    user_field: Annotated[str, typer.Option(help="Field of the row that holds the user.")] = "user_id",
    where: Where = None,
    by: Annotated[str, typer.Option(help="Who deletes, for the exports' manifests.")] = "",
    segments: Annotated[
        bool, typer.Option("--segments", help="Only free bytes of segments that no entry refers to.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete. It cannot be undone.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete for good what entries hold, by task, source, user or filter; look first with `--dry-run`.

    Several conditions must all hold. Bytes are overwritten, exports' manifests name what is gone, and no import brings
    it back. Names, counts and the steps that used an entry stay. What a trainer holds is left; the exit code is then 1.
    Each deletion also frees what nobody refers to in the buffer's segments, and so does `--segments` alone.

    **Examples**

    `triune buffer gc quickstart --user u-1234 --dry-run`

    `triune buffer gc quickstart --where "state = dropped AND age > 30d" --yes`
    """
    from triune.cli.buffer_assets import delete_from

    delete_from(
        run, task, source, user, user_field, where, by, segments=segments, dry_run=dry_run, yes=yes, as_json=as_json
    )


@buffer_app.command("verify")
def buffer_verify(run: Run, as_json: AsJson = False) -> None:
    """Read every byte of a store: its pages, checksums, references, and whether all counts add up.

    Ends with exit code 1 when something is wrong. Nothing is changed.

    **Example**

    `triune buffer verify quickstart`
    """
    from triune.cli.buffer_assets import verify_store

    verify_store(run, as_json)
