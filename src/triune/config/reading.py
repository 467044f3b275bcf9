"""A run file as a plain mapping, before anything is validated."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from triune.config.plain import Origin
from triune.errors import ConfigError


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where a configuration came from.

    Attributes:
        raw: The mapping as written, `${…}` not yet resolved.
        where: File name, or "run settings" when it was given from Python.
        folder: Relative paths of plug-ins start here.
        file: The file; None when it was given from Python.
        origins: Of a `run.resolved.json`, where its values came from; None for what people write.
    """

    raw: dict[str, Any]
    where: str
    folder: Path
    file: Path | None = None
    origins: dict[str, Origin] | None = None

    @property
    def is_resolved(self) -> bool:
        """Whether it is a `run.resolved.json`."""
        return self.origins is not None


def read_source(source: str | Path | Mapping[str, Any]) -> Source:
    """Read a YAML run file, the `run.resolved.json` of a run (or its folder), or take a mapping.

    Raises:
        ConfigError: No such file (with the nearest name), malformed YAML (with its line), or not a mapping.
    """
    if isinstance(source, Mapping):
        return Source(raw=_plain(source), where="run settings", folder=Path.cwd())
    path = Path(source)
    if path.is_dir() and (path / "run.resolved.json").is_file():
        path = path / "run.resolved.json"
    if not path.is_file():
        raise _missing(path)
    raw = _parse(path)
    if not isinstance(raw, dict):
        raise ConfigError(
            str(path), f"found {type(raw).__name__}", "a mapping of sections", "see docs/reference/config.md"
        )
    if path.suffix == ".json" and {"config", "origins"} <= raw.keys():
        origins = raw["origins"]
        written = _without_derived(raw["config"], origins)
        return Source(raw=written, where=str(path), folder=path.parent, file=path, origins=origins)
    return Source(raw=raw, where=str(path), folder=path.parent, file=path)


FROM_OUTSIDE = ("name", "runs_dir", "model.path")
"""What is derived from something else than this file: its name, or the staged run that it is a part of."""


def _without_derived(config: Any, origins: Mapping[str, Any], prefix: str = "") -> Any:
    """Leave out what follows from other values, so that an override of those is followed again."""
    if isinstance(config, list):
        return [_without_derived(item, origins, f"{prefix}.{number}") for number, item in enumerate(config)]
    if not isinstance(config, dict):
        return config
    paths = {key: f"{prefix}.{key}" if prefix else key for key in config}
    return {
        key: _without_derived(value, origins, paths[key])
        for key, value in config.items()
        if paths[key] in FROM_OUTSIDE or origins.get(paths[key]) != "derived"
    }


def resolve_interpolations(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Replace `${other.key}` and `${oc.env:NAME}` by their values.

    Raises:
        ConfigError: A name that does not exist; says in which key.
    """
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(dict(raw)), resolve=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or where
        first = str(error).splitlines()[0]
        raise ConfigError(str(key), first, "a key of this file, or ${oc.env:NAME}", "correct the ${…}") from None
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _parse(path: Path) -> Any:
    try:
        return OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(where, problem, "YAML", "correct the line") from None
    except (OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), str(error).splitlines()[0], "a YAML file with sections") from None


def _missing(path: Path) -> ConfigError:
    if path.is_dir():
        return ConfigError(str(path), "a folder without run.resolved.json", "a run file or the folder of a run")
    folder = path.parent if path.parent.is_dir() else Path()
    there = sorted(file.name for file in folder.glob("*.y*ml"))
    near = difflib.get_close_matches(path.name, there, n=1)
    do = f"did you mean {str(folder / near[0])!r}?" if near else "start from examples/quickstart.yaml"
    return ConfigError(str(path), "no such file", "a YAML run file", do)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
