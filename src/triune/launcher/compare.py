"""Variants with the same seeds in turn: ordinary runs, then one table and one picture.

<out>/
  <variant>/seed-<n>/   an ordinary run's folder
  compare.json          the table, with every seed's values and the curves; rewritten after every run
  compare.png           mean curves with 95 % bands
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from triune.config import RunConfig, StagedConfig, load_run_file
from triune.config.overrides import parse_override
from triune.config.problems import raise_all
from triune.errors import ConfigError
from triune.launcher.comparison import Variant, build_report, measure
from triune.launcher.folder import RunFolder, Start
from triune.launcher.local import launch
from triune.launcher.request import Request
from triune.launcher.standing import Standing, standing
from triune.monitor.summary import write_json


def compare_variants(
    files: Sequence[str],
    *,
    seeds: int = 3,
    overrides: Sequence[str] = (),
    metric: str | None = None,
    out: Path | None = None,
    start: Start = Start.NEW,
    say: Callable[[str], None] = lambda sentence: None,
) -> dict[str, Any]:
    """Run every variant with every seed, one after another, and compare them.

    The order is seed by seed, each with all variants (A B A B …), so that a machine that slows down slows all of them.
    A variant whose run fails is not tried with further seeds; the others go on.

    Args:
        files: Run files; the first is what the others are compared with.
        seeds: How many; the first is the first file's `seed`.
        overrides: `a.b=c` changes of all files.
        metric: What to compare; None = `eval/reward` where every variant measures it, else `reward`.
        out: Folder of everything; None = `<runs_dir>/compare/<names>`.
        start: New, resumed (finished runs are skipped), or begun again.
        say: Told which run begins.

    Returns:
        What `compare.json` says.

    Raises:
        ConfigError: A file cannot be run, or `out` holds a comparison already; nothing was started.
        CheckpointError: A run there was begun with other settings.
        KeyboardInterrupt: A signal ended it; it can be resumed.
    """
    variants, folder = load_variants(files, seeds=seeds, overrides=overrides, out=out)
    chosen = metric or _usual_metric(variants)
    _check_metric(variants, chosen)
    plan = _prepare(variants, folder, start)
    order = [(variant, seed) for seed in variants[0].runs for variant in variants]

    def save(status: str) -> dict[str, Any]:
        report = build_report(variants, chosen, folder, status)
        write_json(folder / "compare.json", report)
        return report

    try:
        for number, (variant, seed) in enumerate(order, start=1):
            label = f"run {number} of {len(order)}, {variant.name} with seed {seed}"
            if plan[variant.name, seed] is Standing.FINISHED:
                say(f"{label}: is finished, skipped")
            elif variant.errors:
                say(f"{label}: left out, an earlier one failed")
            else:
                say(label)
                _run(variant, seed, plan[variant.name, seed])
                save("running")
    except KeyboardInterrupt:
        save("interrupted")
        raise
    report = save("failed" if any(variant.errors for variant in variants) else "finished")
    _check_measured(report, variants, folder)
    return report


def load_variants(
    files: Sequence[str], *, seeds: int, overrides: Sequence[str], out: Path | None
) -> tuple[list[Variant], Path]:
    """Read every file with every seed; the variants and the folder of all.

    Raises:
        ConfigError: All problems of all files at once.
    """
    problems: list[ConfigError] = list(_problems_of_overrides(overrides))
    names = [Path(file).stem for file in files]
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.append(
            ConfigError(name, "several variants have this name", "files with names of their own", "copy one")
        )
    firsts = []
    for file in files:
        try:
            first = load_run_file(file, overrides)
        except ConfigError as error:
            problems.append(type(error)(f"{file}: {error.where}", error.found, error.expected, error.do))
            continue
        problems += _problems_of_variant(file, first)
        if isinstance(first, RunConfig):
            firsts.append(first)
    raise_all(problems, "triune compare")
    folder = out or Path(firsts[0].runs_dir) / "compare" / "-".join(names)
    numbers = range(firsts[0].seed, firsts[0].seed + seeds)
    variants = []
    for name, file in zip(names, files, strict=True):
        runs = {}
        for seed in numbers:
            mine = (f"seed={seed}", f"name=seed-{seed}", f"runs_dir={json.dumps(str(folder / name))}")
            run = load_run_file(file, [*overrides, *mine])
            assert isinstance(run, RunConfig)
            runs[seed] = run
        variants.append(Variant(name=name, file=file, runs=runs))
    return variants, folder


def _problems_of_overrides(overrides: Sequence[str]) -> Iterator[ConfigError]:
    for text in overrides:
        key = parse_override(text)[0][0]
        if key in ("name", "runs_dir"):
            yield ConfigError(f"override {key}", "found in a comparison, which names its runs itself", "", "use --out")


def _problems_of_variant(file: str, config: RunConfig | StagedConfig) -> Iterator[ConfigError]:
    if isinstance(config, StagedConfig):
        yield ConfigError(
            f"{file}: stages", f"found {len(config.stages)} stages", "a single run, whose steps are the axis",
            "compare files of one stage that begin with `model.path: runs/NAME/01-STAGE/export`",
        )  # fmt: skip
    elif not any(getattr(sink, "__brick__", ("", ""))[1] == "jsonl" for sink in config.monitor.sinks):
        yield ConfigError(
            f"{file}: monitor.sinks", "found no jsonl", "the rows that curves are drawn from", "add `jsonl` to the list"
        )


def _usual_metric(variants: Sequence[Variant]) -> str:
    return "eval/reward" if all(_measures(variant) for variant in variants) else "reward"


def _measures(variant: Variant) -> bool:
    section = next(iter(variant.runs.values())).eval
    return section.tasks is not None and bool(section.every)


def _check_metric(variants: Sequence[Variant], metric: str) -> None:
    """A metric that no evaluation will make is asked for now, not after hours."""
    for variant in variants:
        if metric.startswith("eval/") and not _measures(variant):
            raise ConfigError(
                "--metric", f"found {metric}, and {variant.file} measures nothing", "eval.every and eval.tasks",
                "write `eval: {every: 20, tasks: {use: …}}`, or --metric reward",
            )  # fmt: skip


def _prepare(variants: Sequence[Variant], folder: Path, start: Start) -> dict[tuple[str, int], Standing]:
    """What is there already, by variant and seed; with `restart` it is moved aside."""
    runs = {(variant.name, seed): run for variant in variants for seed, run in variant.runs.items()}
    begun = [run for run in runs.values() if RunFolder(run.run_dir).has_begun]
    if begun and start is Start.NEW:
        raise ConfigError(
            str(folder),
            f"holds {len(begun)} of these runs already",
            "an empty place for a new comparison",
            "go on with --resume, begin again with --restart (old folders are kept), or name another folder with --out",
        )
    if start is Start.RESTART:
        for run in begun:
            RunFolder.open(run.runs_dir, run.name, start, roles=("explorer", "trainer")).release()
    return {key: standing(run) for key, run in runs.items()}


def _run(variant: Variant, seed: int, state: Standing) -> None:
    """One run; how it fails is a fact about its variant."""
    try:
        launch(Request(config=variant.runs[seed], roles=("explorer", "trainer"), start=state.start))
    except Exception as error:
        variant.errors[seed] = str(error) or type(error).__name__


def _check_measured(report: Mapping[str, Any], variants: Sequence[Variant], folder: Path) -> None:
    """A metric that no run has is a mistake in its name; the runs are done, so looking again costs nothing.

    Raises:
        ConfigError: Names what the runs have.
    """
    metric = report["metric"]
    for variant, row in zip(variants, report["variants"], strict=True):
        if row["status"] == "finished" and not row["seeds"]:
            names = measure(next(iter(variant.runs.values())).run_dir, metric).metrics
            shown = [name for name in names if name in ("reward", "loss") or name.startswith("eval/")]
            raise ConfigError(
                "--metric",
                f"{variant.name} has no {metric}",
                f"one of {', '.join(shown or names)}",
                f"ask again with `--metric NAME --resume --out {folder}`: the runs are kept",
            )
