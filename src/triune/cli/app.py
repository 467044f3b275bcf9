"""The commands and their help texts; what they do is in the modules beside this one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from triune.cli.buffer_commands import buffer_app

app = typer.Typer(
    name="triune",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Reinforcement fine-tuning of LLM agents that keep learning from what they do.

A run file says which model learns which tasks with which algorithm. `triune run` explores and trains in one process;
`triune explore` and `triune train` are its two halves for two processes. Everything a run makes is in `runs/<name>/`.

Start with `triune run examples/quickstart.yaml`, look with `triune buffer show quickstart`, read docs/tour.md.
""",
    epilog="Exit codes: 0 done, 1 the run failed, 2 what was written cannot be run, 130 interrupted.",
)
app.add_typer(buffer_app, name="buffer")

RunFile = Annotated[str, typer.Argument(metavar="FILE", help="YAML run file, or the folder of a run.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[a.b=c …]", help="Changes of single keys, values as in YAML.")
]
RunFolder = Annotated[str, typer.Argument(metavar="RUN", help="Folder of a run, or its name under `runs/`.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint of this run.")]
Restart = Annotated[bool, typer.Option("--restart", help="Begin again; the old folder is moved aside, not deleted.")]
AllowChanges = Annotated[
    bool, typer.Option("--allow-changes", help="Resume although settings have changed since the run began.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; accepted anywhere.")] = False,
) -> None:
    if version:
        from triune import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.command()
def run(
    file: RunFile,
    overrides: Overrides = None,
    resume: Resume = False,
    restart: Restart = False,
    allow_changes: AllowChanges = False,
) -> None:
    """Explore and train in one process until the run's steps are done.

    Ends with the reward before and after, the exported model and `curve.png`. Ctrl-C or `kill -9` lose nothing that a
    checkpoint holds: `--resume` goes on.

    A file with `stages:` makes several runs, each from the weights of the one before, in folders inside the run's;
    `--resume` skips the finished ones.

    **Examples**

    `triune run examples/quickstart.yaml`

    `triune run my.yaml seed=1 trainer.steps=200 algorithm.policy_loss.clip_high=0.28`

    `triune run my.yaml --resume`

    `triune run staged.yaml stages.1.trainer.steps=50`
    """
    from triune.cli.runs import start

    start("run", file, overrides, resume=resume, restart=restart, allow_changes=allow_changes)


@app.command()
def explore(file: RunFile, overrides: Overrides = None) -> None:
    """Only explore: sample rollouts into the run's buffer beside `triune train`, in as many processes as you like.

    Needs `sync.channel: files`. Waits for a trainer of the same run, follows its weights, and ends with it.

    **Example**

    `triune explore my.yaml sync.channel=files`
    """
    from triune.cli.runs import start

    start("explore", file, overrides, resume=False, restart=False, allow_changes=False)


@app.command()
def train(
    file: RunFile,
    overrides: Overrides = None,
    resume: Resume = False,
    restart: Restart = False,
    allow_changes: AllowChanges = False,
) -> None:
    """Only train: on what `triune explore` puts into the run's buffer, or on stored experience.

    **Examples**

    `triune train my.yaml sync.channel=files`

    `triune train my.yaml --resume`
    """
    from triune.cli.runs import start

    start("train", file, overrides, resume=resume, restart=restart, allow_changes=allow_changes)


@app.command()
def bench(
    file: RunFile,
    overrides: Overrides = None,
    endpoint: Annotated[
        str | None, typer.Option(help="Name under `models:` of an OpenAI-compatible endpoint to measure instead.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure all checkpoints of a run, or a model behind an endpoint, on the run's `eval.tasks`.

    **Examples**

    `triune bench runs/quickstart`

    `triune bench my.yaml --endpoint judge eval.samples=4`
    """
    from triune.cli.runs import bench as measure

    measure(file, overrides, endpoint, as_json)


@app.command()
def check(file: RunFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Resolve and validate a run file without running it; print every value, its origin, and what a step consumes.

    **Example**

    `triune check examples/quickstart.yaml trainer.tasks_per_step=64`
    """
    from triune.cli.checking import check as resolve

    resolve(file, overrides, as_json)


@app.command()
def selfcheck(
    file: RunFile,
    overrides: Overrides = None,
    only: Annotated[list[str] | None, typer.Option(help="Only this check; may be given several times.")] = None,
    out: Annotated[Path | None, typer.Option(help="File to write; default `<runs_dir>/<name>.selfcheck.json`.")] = None,
    as_json: AsJson = False,
) -> None:
    """Prove on the file's own model, template, engine, workflow and reward that what a run would compute is right.

    Makes a few groups of real rollouts and single training steps on them, in about a minute, and says of every check
    what it found and, where something is wrong, the cause and what to do. Nothing of the run is touched. Ends with exit
    code 1 when a check failed.

    **Examples**

    `triune selfcheck my.yaml`

    `triune selfcheck my.yaml explorer.temperature=0.7 --only logprobs --only first_update`
    """
    from triune.cli.selfchecking import selfcheck as prove

    prove(file, overrides, only or [], out, as_json)


@app.command()
def compare(
    words: Annotated[
        list[str], typer.Argument(metavar="FILE… [a.b=c …]", help="Run files, and changes of keys in all of them.")
    ],
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds; the first is the first file's `seed`.")] = 3,
    metric: Annotated[
        str | None, typer.Option(help="What to compare; default: `eval/reward` where it is measured, else `reward`.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of all runs; default: `<runs_dir>/compare/<names>`.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Skip what is finished and go on with the rest.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Begin again; old folders are moved aside.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print `compare.json` in one last line.")] = False,
) -> None:
    """Run variants with the same seeds in turn; draw their mean curves with 95 % bands, print first and last values.

    Every run is an ordinary one, in `<out>/<file>/seed-<n>`. The table gives the difference within each variant and,
    paired by seed, to the first one, with t-based 95 % intervals over seeds. Ends with exit code 1 when a variant
    failed, after the others are done.

    **Examples**

    `triune compare grpo.yaml mix.yaml --seeds 3`

    `triune compare grpo.yaml mix.yaml trainer.steps=50 --metric reward --out runs/short --json`
    """
    from triune.cli.comparing import compare as run_all

    run_all(words, seeds, metric, out, resume=resume, restart=restart, as_json=as_json)


@app.command()
def ls(
    kind: Annotated[str | None, typer.Argument(help="Kind of brick, for example `algorithms` or `operators`.")] = None,
    plugin: Annotated[list[str] | None, typer.Option(help="Plug-in file to load first.")] = None,
) -> None:
    """List what `use:` accepts: the kinds of bricks, or the bricks of a kind.

    **Examples**

    `triune ls`, `triune ls operators`, `triune ls rewards --plugin my.py`
    """
    from triune.cli.bricks import list_bricks

    list_bricks(kind, plugin or [])


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="Name of a brick, `kind/name`, or `module:attr`.")],
    source: Annotated[bool, typer.Option(help="Print the source too.")] = True,
    plugin: Annotated[list[str] | None, typer.Option(help="Plug-in file to load first.")] = None,
) -> None:
    """Explain a brick: what it does, its fields with types, defaults and meaning, its formula, its source.

    **Examples**

    `triune show ppo_clip`, `triune show advantage/grpo --no-source`
    """
    from triune.cli.bricks import show_brick

    show_brick(name, source, plugin or [])


@app.command()
def export(
    run: RunFolder,
    step: Annotated[int | None, typer.Option(help="Checkpoint to export; default: the newest.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write; default: `<run>/export`.")] = None,
) -> None:
    """Write a checkpoint as an ordinary Hugging Face folder (weights, configuration, tokenizer, chat template).

    **Example**

    `triune export runs/quickstart --step 40 --out my-model`
    """
    from triune.cli.runs import export as write

    write(run, step, out)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what this machine can run: Python, torch, threads, memory, disk, and which extras are installed."""
    from triune.cli.doctor import doctor as examine

    examine(as_json)
