"""A configuration as plain values, each with where it came from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from triune.registry import HOMES, fields_of, import_path

Origin = Literal["default", "file", "override", "derived"]


def to_plain(value: Any) -> Any:
    """Settings and bricks as mappings that `load_config` reads again; bricks as `{use: …, field: …}`."""
    if isinstance(value, BaseModel):
        return {name: to_plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {name: to_plain(item) for name, item in fields_of(value).items()}
        return {"use": use_of(type(value)), **fields}
    if callable(value):
        return use_of(value)
    return value


def use_of(target: Any) -> str:
    """What to write after `use:`: the name of a built-in, else its import path."""
    kind, name = getattr(target, "__brick__", ("", ""))
    if kind and target.__module__.startswith(f"{HOMES[kind]}."):
        return name
    return import_path(target)


def leaves(plain: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of everything that is no mapping or list; empty ones count as values."""
    items: Any = ()
    if isinstance(plain, Mapping):
        items = plain.items()
    elif isinstance(plain, list):
        items = enumerate(plain)
    if not items:
        yield prefix, plain
        return
    for key, item in items:
        yield from leaves(item, f"{prefix}.{key}" if prefix else str(key))


def origins(
    plain: Mapping[str, Any], raw: Mapping[str, Any], set_paths: Sequence[tuple[str, ...]], derived: Sequence[str]
) -> dict[str, Origin]:
    """Where each leaf of a resolved configuration came from.

    Args:
        plain: The resolved configuration.
        raw: The mapping as read from the file, overrides applied.
        set_paths: Paths that overrides have set.
        derived: Dotted paths that were computed from others.
    """
    found: dict[str, Origin] = {}
    overridden = [".".join(path) for path in set_paths]
    for path, _ in leaves(plain):
        names = _short_forms(path)
        if path in derived:
            found[path] = "derived"
        elif any(name == set_path or name.startswith(f"{set_path}.") for name in names for set_path in overridden):
            found[path] = "override"
        else:
            found[path] = "file" if any(_is_in(raw, name.split(".")) for name in names) else "default"
    return found


def _short_forms(path: str) -> list[str]:
    """`tasks.sets.0.path` may have been written `tasks.0.path` or `tasks.path`; `x.use` may have been `x: name`."""
    found = [
        path,
        re.sub(r"(^|\.)tasks\.sets\.(\d+)", r"\1tasks.\2", path),
        re.sub(r"(^|\.)tasks\.sets\.0", r"\1tasks", path),
    ]
    return list(dict.fromkeys(found))


def _is_in(raw: Any, path: Sequence[str]) -> bool:
    for depth, key in enumerate(path):
        if isinstance(raw, Mapping) and key in raw:
            raw = raw[key]
        elif isinstance(raw, list) and key.isdigit() and int(key) < len(raw):
            raw = raw[int(key)]
        else:
            return isinstance(raw, str) and list(path[depth:]) == ["use"]
    return True


def hash_of(plain: Any) -> str:
    """16 hex digits over a plain value, independent of the order of its keys."""
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
