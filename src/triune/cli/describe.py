"""What a brick says of itself: docstring, fields, source. For `triune show` and the reference page."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from triune import registry
from triune.config.plain import use_of


class FieldPage(msgspec.Struct, frozen=True, kw_only=True):
    """One hyper-parameter."""

    name: str
    type: str
    default: str
    doc: str


class BrickPage(msgspec.Struct, frozen=True, kw_only=True):
    """One brick."""

    kind: str
    name: str
    path: str
    doc: str
    fields: tuple[FieldPage, ...]
    file: str
    source: str

    @property
    def summary(self) -> str:
        """First sentence of the docstring."""
        return re.split(r"(?<=[.:])\s|\n\n", self.doc.strip(), maxsplit=1)[0].replace("\n", " ").rstrip(":")


def describe(kind: str, use: str) -> BrickPage:
    """Read a brick's page; raises ConfigError for an unknown name, PluginError when it does not import."""
    target = registry.find(kind, use, f"{kind} {use!r}")
    doc, documented = _split_attributes(inspect.getdoc(target) or "")
    if inspect.isclass(target) and not vars(target).get("__doc__"):
        doc = ""
    return BrickPage(
        kind=kind,
        name=use_of(target),
        path=registry.import_path(target),
        doc=doc,
        fields=tuple(_fields(target, documented)) if dataclasses.is_dataclass(target) else (),
        file=inspect.getsourcefile(target) or "",
        source=_source(target),
    )


def _source(target: Any) -> str:
    try:
        return inspect.getsource(target)
    except OSError:
        return ""


def _fields(target: Any, documented: dict[str, str]) -> list[FieldPage]:
    docs: dict[str, str] = {}
    for base in reversed(target.__mro__[:-1]):
        docs |= _split_attributes(inspect.cleandoc(vars(base).get("__doc__") or ""))[1]
        docs |= attribute_docs(base)
    docs |= documented
    hints = get_type_hints(target, include_extras=True)
    return [
        FieldPage(
            name=field.name,
            type=type_text(hints[field.name], field.metadata.get("kind")),
            default=_default_text(field),
            doc=docs.get(field.name, ""),
        )
        for field in dataclasses.fields(target)
        if field.init
    ]


def attribute_docs(target: type) -> dict[str, str]:
    """String literals under the fields of a class."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(target)))
    except (OSError, TypeError, SyntaxError):
        return {}
    (definition,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    found = {}
    for node, after in zip(definition.body, definition.body[1:], strict=False):
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and is_text:
            found[node.target.id] = " ".join(str(after.value.value).split())  # type: ignore[attr-defined]
    return found


def _split_attributes(doc: str) -> tuple[str, dict[str, str]]:
    """The docstring without its `Attributes:` section, and that section as name → text."""
    match = re.search(r"(?m)^Attributes:\n((?:[ \t]+.*\n?|\n(?=[ \t]))+)", doc)
    if match is None:
        return doc, {}
    body = textwrap.dedent(match.group(1))
    found = {name: " ".join(text.split()) for name, text in re.findall(r"(?m)^(\w+):((?:.*\n?)(?:[ \t]+.*\n?)*)", body)}
    return (doc[: match.start()].rstrip() + "\n\n" + doc[match.end() :].lstrip()).strip(), found


def type_text(hint: Any, kind: str | None = None) -> str:
    """A type as a run file's author thinks of it."""
    if kind:
        return f"{kind} brick"
    origin, arguments = get_origin(hint), get_args(hint)
    metadata = getattr(hint, "__metadata__", None)
    if metadata is not None:
        return metadata_text(type_text(arguments[0]), metadata)
    if hint is type(None):
        return "null"
    if origin is None:
        return _NAMES.get(hint) or getattr(hint, "__name__", str(hint))
    if str(origin) == "typing.Literal":
        return " | ".join(str(argument) for argument in arguments)
    inner = [type_text(argument) for argument in arguments if argument is not Ellipsis]
    if origin in (list, tuple, set, frozenset):
        return f"list of {' or '.join(dict.fromkeys(inner))}"
    if origin is dict or getattr(origin, "__name__", "") == "Mapping":
        return f"mapping of {inner[-1]}"
    return " | ".join(inner)


def metadata_text(text: str, metadata: Any) -> str:
    """A type with its bounds; the kind of brick where the annotation names one."""
    kind = next((item.kind for item in metadata if isinstance(getattr(item, "kind", None), str)), None)
    return f"{kind} brick" if kind else text + _bounds(metadata)


_NAMES: dict[Any, str] = {Any: "any", float: "number", int: "integer", str: "text", bool: "true | false"}


def _bounds(metadata: Any) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = []
    for item in metadata:
        for part in [item, *getattr(item, "metadata", ())]:
            found += [f"{sign} {getattr(part, key):g}" for key, sign in signs.items() if _is_number(part, key)]
    return f" ({', '.join(dict.fromkeys(found))})" if found else ""


def _is_number(part: Any, key: str) -> bool:
    return isinstance(getattr(part, key, None), int | float)


def _default_text(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return value_text(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return value_text(field.default_factory())
    return "required"


def value_text(value: Any) -> str:
    """A value as it is written in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = [
            f"{field.name}: {value_text(getattr(value, field.name))}"
            for field in dataclasses.fields(value)
            if field.init and getattr(value, field.name) != field.default and field.default is not dataclasses.MISSING
        ]
        name = use_of(type(value))
        return f"{{use: {name}, {', '.join(changed)}}}" if changed else name
    if isinstance(value, list | tuple):
        return f"[{', '.join(value_text(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {value_text(item)}" for key, item in value.items()) + "}"
    return str(value) if value != "" else '""'
