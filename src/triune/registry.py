"""Bricks: small replaceable parts that are their own configuration.

A brick is a frozen keyword-only dataclass (or a plain function) with a kind and a name. Its fields are its
hyper-parameters; its `__call__` is the maths. A built-in lives alone in the file of its name inside the package of
its kind, so adding one adds a file and changes none: `use: ppo_clip` is the class marked `@brick("policy_loss")` in
`triune/algorithms/policy_losses/ppo_clip.py`. Users name an import path (`my_pkg.losses:MyLoss`), an entry
point of the group `triune.plugins`, or anything marked in a file listed under `plugins:`.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from triune.errors import ConfigError, PluginError

T = TypeVar("T")

HOMES: dict[str, str] = {
    "algorithm": "triune.algorithms.zoo",
    "advantage": "triune.algorithms.advantages",
    "policy_loss": "triune.algorithms.policy_losses",
    "kl": "triune.algorithms.kls",
    "entropy": "triune.algorithms.entropies",
    "critic": "triune.algorithms.critics",
    "sampling": "triune.algorithms.samplings",
    "operator": "triune.pipelines.operators",
    "taskset": "triune.tasks.tasksets",
    "selector": "triune.tasks.selectors",
    "reward": "triune.tasks.rewards",
    "workflow": "triune.explorer.workflows",
    "engine": "triune.explorer.engines",
    "store": "triune.buffer.stores",
    "priority": "triune.buffer.priorities",
    "channel": "triune.sync.channels",
    "sink": "triune.monitor.sinks",
    "alarm": "triune.monitor.alarms",
}
"""Kind → package whose modules hold the built-in bricks of that kind, one a file."""

_marked: dict[tuple[str, str], Any] = {}


def snake_case(name: str) -> str:
    """`PPOClip` → `ppo_clip`, `GuessNumber` → `guess_number`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def brick(kind: str, name: str | None = None) -> Callable[[T], T]:
    """Mark a frozen dataclass or a function as the brick `name` (default: its own name in snake case) of a kind."""
    if kind not in HOMES:
        raise PluginError(f"brick kind {kind!r}", "no such kind", ", ".join(HOMES))

    def mark(target: T) -> T:
        chosen = name or snake_case(target.__name__)  # type: ignore[attr-defined]
        target.__brick__ = (kind, chosen)  # type: ignore[attr-defined]
        _marked[kind, chosen] = target
        return target

    return mark


def names(kind: str) -> list[str]:
    """All names that `use:` accepts for a kind, without importing the built-ins."""
    home = HOMES[kind]
    found = {chosen for of_kind, chosen in _marked if of_kind == kind}
    if importlib.util.find_spec(home) is not None:
        package = importlib.import_module(home)
        found |= {m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_")}
    found |= {e.name.partition(".")[2] for e in _entry_points() if e.name.startswith(f"{kind}.")}
    return sorted(found)


def _entry_points() -> importlib.metadata.EntryPoints:
    """Installed plug-ins: entry points of group `triune.plugins` named `kind.name`."""
    return importlib.metadata.entry_points(group="triune.plugins")


def find(kind: str, use: str, where: str) -> Any:
    """The class or function that `use` names.

    Args:
        kind: One of `HOMES`.
        use: Built-in name, name marked by a plug-in, entry point, or `module:attr`.
        where: Dotted key for messages.

    Raises:
        ConfigError: No such brick; proposes the nearest name.
        PluginError: Its module does not import.
    """
    if ":" in use:
        module_name, _, attribute = use.partition(":")
        return _import(module_name, attribute, where)
    if (kind, use) in _marked:
        return _marked[kind, use]
    home = f"{HOMES[kind]}.{use}"
    if use.isidentifier() and importlib.util.find_spec(home) is not None:
        module = importlib.import_module(home)
        for value in vars(module).values():
            if getattr(value, "__brick__", None) == (kind, use):
                return value
        raise PluginError(where, f"{home} marks no {kind} named {use!r}", "", f"mark it with @brick({kind!r})")
    for entry in _entry_points():
        if entry.name == f"{kind}.{use}":
            return _import(entry.module, entry.attr, where)
    near = difflib.get_close_matches(use, names(kind), n=1)
    raise ConfigError(
        where,
        f"no {kind} is called {use!r}",
        f"one of {', '.join(names(kind))}, or module:attr",
        f"did you mean {near[0]!r}?" if near else f"list them with `triune ls {kind}`",
    )


def _import(module_name: str, attribute: str, where: str) -> Any:
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise PluginError(where, f"{module_name} does not import ({type(error).__name__}: {error})") from error
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        do = f"did you mean {near[0]!r}?" if near else ""
        raise PluginError(where, f"{module_name} has no {attribute!r}", "", do)
    return getattr(module, attribute)


def import_path(target: Any) -> str:
    """`module:attr` of a brick, so that workers on other machines need no registry in memory."""
    return f"{target.__module__}:{target.__qualname__}"


def build(kind: str, spec: str | Mapping[str, Any], where: str) -> Any:
    """Make the brick that a configuration names.

    Args:
        kind: One of `HOMES`.
        spec: `name`, or a mapping with `use: name` and the brick's fields.
        where: Dotted key for messages.

    Returns:
        An instance of the dataclass; for a function, the function itself (it takes no fields).

    Raises:
        ConfigError: Unknown name, unknown field (with the nearest one), or a value of the wrong type.
    """
    fields = {"use": spec} if isinstance(spec, str) else dict(spec) if isinstance(spec, Mapping) else {}
    use = fields.pop("use", None)
    if not isinstance(use, str):
        raise ConfigError(where, f"found {spec!r}", f"`use: NAME` of a {kind}", f"list them with `triune ls {kind}`")
    target = find(kind, use, where)
    if not inspect.isclass(target):
        if fields:
            raise ConfigError(where, f"{use} is a function and takes no fields, found {', '.join(fields)}")
        return target
    return construct(target, fields, where)


def construct(target: type[T], fields: Mapping[str, Any], where: str) -> T:
    """Validate fields against a dataclass's annotations (pydantic rules, no extra fields) and make it.

    Raises:
        ConfigError: All problems at once, each as `where.field: found; expected; did you mean`.
    """
    if not dataclasses.is_dataclass(target):
        raise PluginError(where, f"{target.__name__} is no dataclass", "@dataclass(frozen=True, kw_only=True)")
    known = [field.name for field in dataclasses.fields(target) if field.init]
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            do = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known) or 'no fields'}"
            raise ConfigError(f"{where}.{name}", f"{target.__name__} has no such field", "", do)
    bricks = {field.name: field for field in dataclasses.fields(target) if "kind" in field.metadata}
    values = dict(fields)
    for name in bricks.keys() & values.keys():
        values[name] = _brick_value(bricks[name], values[name], f"{where}.{name}")
    try:
        return _adapter(target).validate_python(values)
    except ValidationError as error:
        problems = [
            f"{where}.{'.'.join(map(str, item['loc']))}: found {item['input']!r}; {item['msg']}"
            for item in error.errors()
        ]
        raise ConfigError(where, "\n  ".join(problems)) from None


def brick_field(kind: str, default: Any) -> Any:
    """A dataclass field that holds another brick.

    In a run file `{use: other, …}` replaces it, and a mapping without `use` changes single fields of the default.
    The field's annotation is `Any`, or a type whose instances pydantic accepts unchanged.
    """
    return dataclasses.field(default=default, metadata={"kind": kind})


def _brick_value(field: dataclasses.Field[Any], value: Any, where: str) -> Any:
    if isinstance(value, str) or (isinstance(value, Mapping) and "use" in value):
        return build(field.metadata["kind"], value, where)
    if not isinstance(value, Mapping):
        return value
    if not dataclasses.is_dataclass(field.default):
        raise ConfigError(where, f"found {dict(value)!r} without `use`", f"`use: NAME` of a {field.metadata['kind']}")
    return construct(type(field.default), {**fields_of(field.default), **value}, where)


_adapters: dict[type, TypeAdapter[Any]] = {}


def _adapter(target: type[T]) -> TypeAdapter[T]:
    if target not in _adapters:
        if not hasattr(target, "__pydantic_config__"):
            target.__pydantic_config__ = ConfigDict(arbitrary_types_allowed=True)  # type: ignore[attr-defined]
        _adapters[target] = TypeAdapter(target)
    return _adapters[target]


def fields_of(instance: Any) -> dict[str, Any]:
    """Every field of a brick with its value, for `run.resolved.json` and `triune show`."""
    if not dataclasses.is_dataclass(instance):
        return {}
    return {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}
