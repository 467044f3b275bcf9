"""A run file with `stages`: runs one after another, each from the weights that the one before it exported."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from triune.config.loading import compose, load_config, name_from_file
from triune.config.overrides import apply_overrides
from triune.config.plain import Origin
from triune.config.plugins import copy_plugins
from triune.config.problems import raise_all
from triune.config.reading import Source, read_source, resolve_interpolations
from triune.config.run_config import NAME, RunConfig, config_hash
from triune.errors import CheckpointError, ConfigError

OF_ALL = ("runs_dir", "plugins", "stages")
"""What belongs to the top of a run file, and to no stage."""

Keys = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class StagedConfig:
    """A run of several stages, each an ordinary run whose folder is in the folder of all.

    Attributes:
        name: Name of the whole.
        runs_dir: Folder of all runs.
        stages: In order; called `01-…`, `02-…`.
        origin: Where the whole's name came from.
    """

    name: str
    runs_dir: str
    stages: tuple[RunConfig, ...]
    origin: Origin = "file"

    @property
    def run_dir(self) -> Path:
        """`<runs_dir>/<name>`."""
        return Path(self.runs_dir) / self.name


def load_run_file(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig | StagedConfig:
    """Read a run file of one run or of several stages; nothing is written, no model or data is loaded.

    An override of a top-level key changes the stages that take it from there; `stages.1.a.b=c` changes one.

    Raises:
        ConfigError: All problems of all stages at once (`stages.1.trainer.steps: …`).
        PluginError: A plug-in file does not import.
    """
    read = read_source(source)
    if "stages" not in read.raw:
        return load_config(source, overrides)
    raw, set_paths = apply_overrides(read.raw, overrides)
    stages = raw.pop("stages")
    if not isinstance(stages, list) or not stages:
        raise ConfigError("stages", f"found {stages!r}", "a list of stages", "write `stages: [{name: first, …}, …]`")
    top, named = name_from_file(raw, read)
    whole = resolve_interpolations({key: top[key] for key in ("name", "runs_dir") if key in top}, read.where)
    name, runs_dir = str(whole.get("name", "run")), str(whole.get("runs_dir", "runs"))
    problems = [
        *_problems_of_name("name", name),
        *(each for number, own in enumerate(stages) for each in _problems_of_form(number, own)),
    ]
    raise_all(problems, read.where)
    problems += _problems_of_place(stages)
    problems += _problems_of_reach(top, stages, set_paths)
    stages = [{key: own[key] for key in own if key not in OF_ALL} for own in stages]
    folder = str(Path(runs_dir) / name)
    found = [_compose_stage(number, stages, top, read, set_paths, folder) for number in range(len(stages))]
    raise_all([*problems, *_gathered(found, top, stages)], read.where)
    configs = tuple(each for each in found if isinstance(each, RunConfig))
    set_by_hand = ("name",) in set_paths
    origin: Origin = "derived" if named else "override" if set_by_hand else "file" if "name" in top else "default"
    return StagedConfig(name=name, runs_dir=runs_dir, stages=configs, origin=origin)


def merge(top: Any, own: Any) -> Any:
    """What a stage writes over what the top of the file says.

    Mappings are merged field by field, unless the stage names another brick (or `sets` where one task set was); all
    else is replaced.
    """
    if not _is_merged(top, own):
        return own
    top = _as_mapping(top)
    return {**top, **{key: merge(top.get(key), value) for key, value in own.items()}}


def stage_name(config: RunConfig) -> str:
    """What the run file calls a stage: its run's name without the number."""
    return config.name.partition("-")[2]


def save_staged(config: StagedConfig) -> Path:
    """Write `run.resolved.json` of the whole, a run file of all its stages, and copies of the plug-ins."""
    plain: list[dict[str, Any]] = []
    origins: dict[str, str] = {"name": config.origin}
    for number, stage in enumerate(config.stages):
        values = {key: value for key, value in stage.to_plain().items() if key not in OF_ALL}
        plain.append({**values, "name": stage_name(stage)})
        kept = {path: origin for path, origin in stage.origins.items() if path.partition(".")[0] in values}
        origins |= {f"stages.{number}.{path}": origin for path, origin in kept.items()}
        origins[f"stages.{number}.name"] = "file"
    content = {
        "config_hash": [config_hash(stage) for stage in config.stages],
        "plugins": [plugin.module for plugin in config.stages[0].loaded_plugins],
        "config": {
            "name": config.name,
            "runs_dir": config.runs_dir,
            "plugins": list(config.stages[0].plugins),
            "stages": plain,
        },
        "origins": origins,
    }
    config.run_dir.mkdir(parents=True, exist_ok=True)
    copy_plugins(config.stages[0].loaded_plugins, config.run_dir)
    path = config.run_dir / "run.resolved.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
    return path


def check_same_stages(config: StagedConfig) -> None:
    """Compare the names of the stages with those that the folder was begun with; more may follow.

    Raises:
        CheckpointError: The folder holds a single run, or a stage has another name.
    """
    saved = json.loads((config.run_dir / "run.resolved.json").read_text(encoding="utf-8"))["config"]
    if "stages" not in saved:
        raise CheckpointError(
            str(config.run_dir), "it holds a single run", "a run of several stages", "write another `name`"
        )
    old, new = [stage["name"] for stage in saved["stages"]], [stage_name(stage) for stage in config.stages]
    for number, (was, now) in enumerate(zip(old, new, strict=False)):
        if was != now:
            raise CheckpointError(
                f"resume of {config.run_dir}",
                f"stages.{number}.name: was {was!r}, now {now!r}",
                "the stages it was begun with, in their order",
                "undo the change, or start anew under another `name`",
            )


# ------------------------------------------------------------------------------------------------------ one stage


def _compose_stage(
    number: int, stages: Sequence[Any], top: dict[str, Any], read: Source, set_paths: Sequence[Keys], folder: str
) -> RunConfig | list[ConfigError]:
    own, derived = stages[number], ["name", "runs_dir"]
    raw = merge(top, own)
    raw |= {"name": _run_name(number, own), "runs_dir": folder}
    if number:
        before = Path(folder) / _run_name(number - 1, stages[number - 1])
        raw["model"] = {**(raw.get("model") or {}), "path": str(before / "export")}
        derived.append("model.path")
    prefix = f"stages.{number}."
    if read.origins is not None:
        mine = {path.removeprefix(prefix): origin for path, origin in read.origins.items() if path.startswith(prefix)}
        read = msgspec.structs.replace(read, origins=mine)
    try:
        return compose(raw, read, list(_paths_of(number, top, own, set_paths)), derived)
    except ConfigError as error:  # a plug-in, or a ${…}: the other stages are still looked at
        return [error]


def _run_name(number: int, own: Mapping[str, Any]) -> str:
    return f"{number + 1:02d}-{own['name']}"


def _paths_of(number: int, top: Any, own: Mapping[str, Any], set_paths: Sequence[Keys]) -> Iterator[Keys]:
    """Which overrides changed this stage, as paths in its own configuration."""
    for path in set_paths:
        if path[0] != "stages":
            if _reaches(top, own, path):
                yield path
        elif path[1:2] in ((), (str(number),)):
            yield from [path[2:]] if len(path) > 2 else [(key,) for key in own]


def _is_merged(top: Any, own: Any) -> bool:
    if not isinstance(own, Mapping) or not isinstance(top, Mapping | str):
        return False
    there = _as_mapping(top)
    return own.get("use", there.get("use")) == there.get("use") and not ("sets" in own and "use" in there)


def _as_mapping(value: Any) -> Any:
    return {"use": value} if isinstance(value, str) else value


def _reaches(top: Any, own: Any, path: Sequence[str]) -> bool:
    """Whether a stage takes what the top of the file says at `path`."""
    for key in path:
        if not _is_merged(top, own):
            return False
        if key not in own:
            return True
        top, own = _as_mapping(top).get(key), own[key]
    return _is_merged(top, own)


# ------------------------------------------------------------------------------------------------------- problems


def _problems_of_name(where: str, name: Any) -> Iterator[ConfigError]:
    if not re.match(NAME, str(name)):
        yield ConfigError(
            where, f"found {name!r}", "letters, digits, `_`, `.` and `-`", "write what a folder can be called"
        )


def _problems_of_form(number: int, own: Any) -> Iterator[ConfigError]:
    """What keeps a stage from being looked at further."""
    where = f"stages.{number}"
    if not isinstance(own, Mapping):
        yield ConfigError(
            where, f"found {own!r}", "a mapping of what differs from the rest of the file", "write `{name: …, …}`"
        )
    elif own.get("name") is None:
        yield ConfigError(f"{where}.name", "missing", "a name for the stage's folder", "write `name: …`")
    else:
        yield from _problems_of_name(f"{where}.name", own["name"])


def _problems_of_place(stages: Sequence[Mapping[str, Any]]) -> Iterator[ConfigError]:
    for number, own in enumerate(stages):
        for key in OF_ALL:
            if key in own:
                found = f"found {own[key]!r} in a stage"
                yield ConfigError(f"stages.{number}.{key}", found, "", f"write `{key}` once, at the top of the file")
        model = own.get("model")
        if number and isinstance(model, Mapping) and "path" in model:
            yield ConfigError(
                f"stages.{number}.model.path",
                f"found {model['path']!r}",
                "nothing: a stage begins with the weights of the one before it",
                "leave it out, or make this a run file of its own",
            )


def _problems_of_reach(top: Any, stages: Sequence[Any], set_paths: Sequence[Keys]) -> Iterator[ConfigError]:
    """An override that no stage would notice does nothing, which is never what was meant."""
    for path in set_paths:
        if path[0] not in (*OF_ALL, "name") and not any(_reaches(top, own, path) for own in stages):
            key = ".".join(path)
            yield ConfigError(
                f"override {key}",
                "every stage says something else there",
                "a key that a stage takes from the top of the file",
                f"write `stages.0.{key}=…` for the first stage",
            )


def _gathered(found: Sequence[RunConfig | list[ConfigError]], top: Any, stages: Sequence[Any]) -> list[ConfigError]:
    """The problems of all stages under their keys; what the top of the file says wrong is said once."""
    all_of_them = [each if isinstance(each, list) else [] for each in found]
    everywhere = set.intersection(*({str(problem) for problem in problems} for problems in all_of_them))
    gathered: dict[str, ConfigError] = {}
    for number, problems in enumerate(all_of_them):
        for problem in problems:
            path = problem.where.split(".")
            is_shared = str(problem) in everywhere and all(_reaches(top, own, path) for own in stages)
            where = problem.where if is_shared else f"stages.{number}.{problem.where}"
            placed = type(problem)(where, problem.found, problem.expected, problem.do)
            gathered[str(placed)] = placed
    return list(gathered.values())
