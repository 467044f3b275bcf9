"""`a.b=c` on the command line: changes of single keys of the raw mapping."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from triune.errors import ConfigError

_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+|\[\d+\])*")


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """Split `tasks[0].path=x.jsonl` into `("tasks", "0", "path")` and a value typed as in YAML.

    Raises:
        ConfigError: No `=`, a malformed key, or a value that is no YAML or a broken `${…}`.
    """
    key, equals, value = text.partition("=")
    key = key.strip().removeprefix("--")
    if not equals or not _KEY.fullmatch(key):
        raise ConfigError(f"override {text!r}", "no key=value", "a.b=value", "for example trainer.steps=50")
    try:
        parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException):
        raise ConfigError(f"override {key}", f"found {value!r}", "a YAML value", "quote it: key='\"text\"'") from None
    return tuple(key.replace("[", ".").replace("]", "").split(".")), parsed["value"]


def apply_overrides(raw: Mapping[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], list[tuple[str, ...]]]:
    """A changed copy of the mapping, and the paths that were set.

    Setting one field of a brick keeps its others: `grpo` becomes `{use: grpo}` where a field of it is set.

    Raises:
        ConfigError: A path leads through a list without a number, or past its end, or through a plain value.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(raw))
    paths = []
    for text in overrides:
        path, value = parse_override(text)
        _set(changed, path, value)
        paths.append(path)
    return changed, paths


def _set(root: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    node: Any = root
    for depth, key in enumerate(path[:-1]):
        where = ".".join(path[: depth + 1])
        index = _index(node, key, ".".join(path[:depth]))
        child = node[index] if isinstance(node, list) else node.get(key)
        if child is None:
            child = {}
        elif isinstance(child, str):
            child = {"use": child}
        elif not isinstance(child, dict | list):
            raise ConfigError(f"override {'.'.join(path)}", f"{where} is {child!r}", "a section", f"set {where} itself")
        node[index] = child
        node = child
    node[_index(node, path[-1], ".".join(path[:-1]))] = value


def _index(node: Any, key: str, where: str) -> Any:
    if not isinstance(node, list):
        return key
    if key.isdigit() and int(key) < len(node):
        return int(key)
    raise ConfigError(
        f"override {where}.{key}", f"{where} is a list of {len(node)}", f"{where}.0 … {where}.{len(node) - 1}",
        "name the entry by its number",
    )  # fmt: skip
