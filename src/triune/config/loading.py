"""From a run file to a frozen configuration, in one order: read, override, plug-ins, validate, derive, check."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from triune.config.checks import check_config
from triune.config.consumption import wanted_unit
from triune.config.defaults import name_default_bricks
from triune.config.overrides import apply_overrides
from triune.config.plain import Origin, origins
from triune.config.plugins import Plugin, copy_plugins, load_plugins, use_plugins_of
from triune.config.problems import problems_of, raise_all
from triune.config.reading import Source, read_source, resolve_interpolations
from triune.config.run_config import RunConfig, config_hash, frozen_part
from triune.errors import CheckpointError, ConfigError


def load_config(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """Read, validate and check a configuration; nothing is written, no model or data is loaded.

    Args:
        source: A YAML run file, the folder or `run.resolved.json` of a run, or a mapping.
        overrides: `a.b=c` changes, values typed as in YAML, list entries by number (`tasks.0.path=x`).

    Raises:
        ConfigError: All problems at once, each with its dotted key, what was found, what was expected, what to write.
        PluginError: A plug-in file does not import.
    """
    read = read_source(source)
    changed, set_paths = apply_overrides(read.raw, overrides)
    if "stages" in changed:
        raise ConfigError(
            "stages",
            "found a run of several stages",
            "a single run",
            "give this command the folder of one stage (runs/NAME/01-STAGE); `triune run` and `check` take all of them",
        )
    found = compose(changed, read, set_paths)
    if isinstance(found, RunConfig):
        return found
    raise_all(found, read.where)
    raise AssertionError("no configuration, and no problem")


def compose(
    raw: dict[str, Any], read: Source, set_paths: Sequence[tuple[str, ...]], derived: Sequence[str] = ()
) -> RunConfig | list[ConfigError]:
    """From a mapping with its overrides applied to a configuration, or all that is wrong with it.

    Args:
        raw: The mapping, `${…}` not yet resolved.
        read: Where it came from.
        set_paths: Paths that overrides have set.
        derived: Dotted paths in `raw` that nobody wrote.

    Raises:
        ConfigError: A `${…}` that leads nowhere.
        PluginError: A plug-in file does not import.
    """
    raw, named = name_from_file(resolve_interpolations(raw, read.where), read)
    plugins = _plugins(raw, read)
    try:
        config = RunConfig.model_validate(name_default_bricks(raw, RunConfig))
    except ValidationError as error:
        return problems_of(error, RunConfig)
    if problems := check_config(config):
        return problems
    config, more = _derive(config)
    config._plugins = plugins
    found: dict[str, Origin] = origins(config.to_plain(), raw, set_paths, [*derived, *named, *more])
    if read.origins is not None:
        for path, origin in found.items():
            found[path] = read.origins.get(path, origin) if origin == "file" else origin
    config._origins = found
    return config


def name_from_file(raw: dict[str, Any], read: Source) -> tuple[dict[str, Any], list[str]]:
    """A run file without `name` is called as the file; the list says whether the name was derived."""
    if "name" in raw or read.file is None or read.is_resolved:
        return raw, []
    return {"name": read.file.stem, **raw}, ["name"]


def _plugins(raw: Mapping[str, Any], read: Source) -> tuple[Plugin, ...]:
    files = raw.get("plugins") or ()
    if isinstance(files, str) or not all(isinstance(file, str) for file in files):
        raise ConfigError("plugins", f"found {files!r}", "a list of Python files", "write `plugins: [my.py]`")
    if read.is_resolved:
        use_plugins_of(read.folder)
        files = [str(path.resolve()) for path in sorted((read.folder / "plugins").glob("*.py"))]
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # `use: my_module:MyBrick` means a module beside the user, as in `python -m`
    return load_plugins(files, read.folder)


def _derive(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Fill in what follows from other settings, once; the list names what was filled in."""
    derived, changed = [], {}
    if config.explorer.min_group is None:
        least = getattr(config.algorithm, "smallest_group", config.algorithm.group_size)
        changed["explorer"] = config.explorer.model_copy(update={"min_group": least})
        derived.append("explorer.min_group")
    unit = wanted_unit(config.algorithm)
    if getattr(config.trainer, unit) is None:
        changed["trainer"] = config.trainer.model_copy(update={unit: config.trainer.entries_per_step})
        derived.append(f"trainer.{unit}")
    return (config.model_copy(update=changed) if changed else config), derived


def save_resolved(config: RunConfig, run_dir: Path) -> Path:
    """Write `run.resolved.json` (every value with its origin) and the plug-ins' copies into a run's folder."""
    run_dir.mkdir(parents=True, exist_ok=True)
    copy_plugins(config.loaded_plugins, run_dir)
    content = {
        "config_hash": config_hash(config),
        "plugins": [plugin.module for plugin in config.loaded_plugins],
        "config": config.to_plain(),
        "origins": config.origins,
    }
    path = run_dir / "run.resolved.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
    return path


def check_same_run(config: RunConfig, run_dir: Path) -> None:
    """Compare with what the run in this folder was started with.

    Raises:
        CheckpointError: A setting that a resume may not change has changed; names each with both values.
    """
    path = run_dir / "run.resolved.json"
    if not path.is_file():
        raise CheckpointError(str(run_dir), "no run.resolved.json", "the folder of a run", "start without --resume")
    saved = json.loads(path.read_text(encoding="utf-8"))
    if "stages" in saved["config"]:
        raise CheckpointError(
            str(run_dir),
            "it holds a run of several stages",
            "a run like this one",
            "resume the file with the stages, or write another `name`",
        )
    old = frozen_part(saved["config"], saved["plugins"], saved["origins"])
    now = json.loads(json.dumps(config.to_plain()))
    new = frozen_part(now, [plugin.module for plugin in config.loaded_plugins], config.origins)
    changed = [f"{key}: was {old.get(key)!r}, now {new.get(key)!r}" for key in sorted(old.keys() | new.keys())
               if old.get(key) != new.get(key)]  # fmt: skip
    if changed:
        raise CheckpointError(
            f"resume of {run_dir}",
            "the configuration has changed:\n  " + "\n  ".join(changed) + "\n ",
            "the configuration it was started with",
            "undo the change, start anew under another `name`, or resume with --allow-changes",
        )
