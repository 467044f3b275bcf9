"""pydantic's findings as messages in four parts, all of them at once."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from triune.config.words import our_word
from triune.errors import ConfigError

ADVICE = {
    "explorer.temperature": "write `temperature: 1.0`: at 0 all rollouts of a group are the same and "
    "nothing is learned (eval.temperature may be 0)",
    "tasks": "write for example `tasks: {use: arithmetic}`; list task sets with `triune ls tasksets`",
}
"""What to write, for mistakes that pydantic sees but cannot explain."""


def problems_of(error: ValidationError, model: type[BaseModel]) -> list[ConfigError]:
    """Each finding as a ConfigError with its dotted key, what was found, what was expected and what to write."""
    found = [problem for item in error.errors() for problem in _problems(item, model)]
    return list({str(problem): problem for problem in found}.values())


def raise_all(problems: Sequence[ConfigError], where: str) -> None:
    """Raise one ConfigError for all problems; nothing when there is none."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        lines = "\n  ".join(str(problem) for problem in problems)
        raise ConfigError(where, f"{len(problems)} problems\n  {lines}")


def _problems(item: ErrorDetails, model: type[BaseModel]) -> list[ConfigError]:
    where, context = _dotted(item["loc"]), item.get("ctx", {})
    if item["type"] == "brick":
        return _brick_problems(item["loc"], context, model)
    if item["type"] == "extra_forbidden":
        return [_unknown_key(item["loc"], item["input"], model)]
    if item["type"] == "missing":
        what, key = _doc(item["loc"], model) or "a value", where.rpartition(".")[2]
        return [ConfigError(where, "missing", what, ADVICE.get(where) or f"write `{key}: …`")]
    message = _expectation(item["msg"])
    if item["type"] == "value_error" and isinstance(item["input"], Mapping):  # settings that do not go together
        return [ConfigError(where, message)]
    return [
        ConfigError(
            where, f"found {_short(item['input'])}", message, ADVICE.get(where) or _hint(item["input"], message)
        )
    ]


def _brick_problems(
    loc: tuple[int | str, ...], context: Mapping[str, Any], model: type[BaseModel]
) -> list[ConfigError]:
    """What a brick's fields say of themselves, under the dotted key of the section that holds it."""
    where, inner, found = _dotted(loc), str(context["where"]).strip("."), str(context["found"])
    if found.lstrip().startswith("."):  # registry.construct: one line per field
        return [_field_problem(where, line.strip()) for line in found.splitlines()]
    do, ours = str(context["do"]), our_word(inner) if inner else None
    if "no such field" in found:
        if ours:
            do = f"in Triune this is `{ours}`"
        elif do.startswith("it has") and (near := _near_in_section(loc, inner, model)):
            do = f"did you mean `{near}`?"
    return [ConfigError(f"{where}.{inner}" if inner else where, found, str(context["expected"]), do)]


def _field_problem(where: str, line: str) -> ConfigError:
    key, _, rest = line.partition(": ")
    found, _, message = rest.rpartition("; ")
    message = _expectation(message)
    if message == "Field required":
        return ConfigError(f"{where}{key}", "missing", "a value", f"write `{key.rpartition('.')[2]}: …`")
    return ConfigError(f"{where}{key}", found, message, _hint(found.removeprefix("found ").strip("'"), message))


def _near_in_section(loc: tuple[int | str, ...], key: str, model: type[BaseModel]) -> str | None:
    """A field of the section around a brick: `tasks.epocs` means `tasks.epochs`, though it was read as a task set's."""
    section = _model_at(loc[:-2], model) if len(loc) > 1 and loc[-2] == "sets" else None
    near = difflib.get_close_matches(key, section.model_fields if section is not None else (), n=1)
    return f"{_dotted(loc[:-2])}.{near[0]}" if near else None


def _expectation(message: str) -> str:
    for prefix in ("Input should be ", "Value error, "):
        message = message.removeprefix(prefix)
    return message


def _unknown_key(loc: tuple[int | str, ...], value: Any, model: type[BaseModel]) -> ConfigError:
    where, key = _dotted(loc), str(loc[-1])
    section = _model_at(loc[:-1], model)
    known = list(section.model_fields) if section is not None else []
    near = difflib.get_close_matches(key, known, n=1)
    ours = our_word(key)
    elsewhere = _elsewhere(key, model)
    if ours and ours != where and not near:
        do = f"in Triune this is `{ours}`"
    elif elsewhere and (section is model or not near):
        do = f"did you mean `{elsewhere}`?"
    elif near:
        do = f"did you mean {near[0]!r}?"
    else:
        do = f"it has {', '.join(known)}" if known else "remove it"
    name = "a run file" if section is model or section is None else _dotted(loc[:-1])
    return ConfigError(where, f"{name} has no key {key!r} (value {_short(value)})", "", do)


def _elsewhere(key: str, model: type[BaseModel], prefix: str = "") -> str | None:
    """Dotted key of a field with this very name in another section."""
    for name, field in model.model_fields.items():
        if prefix and name == key:
            return f"{prefix}{name}"
        inner = _model_in(field.annotation)
        if inner is not None and (deeper := _elsewhere(key, inner, f"{prefix}{name}.")):
            return deeper
    return None


def _model_at(loc: Sequence[int | str], model: type[BaseModel]) -> type[BaseModel] | None:
    found: type[BaseModel] | None = model
    for part in loc:
        if found is None:
            return None
        if isinstance(part, int) or part not in found.model_fields:
            continue  # an item of a list or mapping, or pydantic's tag of a union member
        found = _model_in(found.model_fields[part].annotation)
    return found


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := _model_in(part)) is not None), None)


def _doc(loc: tuple[int | str, ...], model: type[BaseModel]) -> str:
    section = _model_at(loc[:-1], model)
    field = section.model_fields.get(str(loc[-1])) if section is not None else None
    first = (field.description or "").split(". ")[0].strip().rstrip(".") if field is not None else ""
    return first[:1].lower() + first[1:]


def _hint(value: Any, message: str) -> str:
    choices = [part.strip().strip("'") for part in message.replace(" or ", ", ").split(",")] if "'" in message else []
    near = difflib.get_close_matches(str(value), choices, n=1) if isinstance(value, str) else []
    return f"did you mean {near[0]!r}?" if near else ""


def _dotted(loc: Sequence[int | str]) -> str:
    return ".".join(str(part) for part in loc)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
