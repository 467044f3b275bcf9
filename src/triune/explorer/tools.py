"""Tools a model may call: schemas from functions, calls from text. Nothing the model writes is ever evaluated.

A call is `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, the form most open models are trained on. A call that
cannot be read, or fails, becomes an observation that says so, and a metric.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

import msgspec

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", list: "array", dict: "object"}


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function the model may call, with the schema that the template shows."""

    name: str
    run: Callable[..., Any]
    schema: Mapping[str, Any]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """Read name, parameters and docstring of a function."""
        hints = get_type_hints(function)
        parameters = inspect.signature(function).parameters.values()
        properties = {p.name: {"type": _TYPES.get(hints.get(p.name, str), "string")} for p in parameters}
        required = [p.name for p in parameters if p.default is inspect.Parameter.empty]
        name = getattr(function, "__name__", type(function).__name__)
        schema = {
            "type": "function",
            "function": {
                "name": name,
                "description": inspect.getdoc(function) or "",
                "parameters": {"type": "object", "properties": properties, "required": required},
            },
        }
        return cls(name=name, run=function, schema=schema)


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One call as the model wrote it."""

    name: str
    arguments: Mapping[str, Any]


def read_calls(text: str) -> tuple[list[Call], list[str]]:
    """Calls in an answer, and one message for each that cannot be read."""
    calls, problems = [], []
    for body in _CALL.findall(text):
        try:
            calls.append(_read(body))
        except ValueError as error:
            problems.append(f'error: the tool call cannot be read ({error}); write {{"name": …, "arguments": {{…}}}}')
    return calls, problems


def _read(body: str) -> Call:
    found = json.loads(body)
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        raise ValueError("it names no tool")
    arguments = found.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("its arguments are no object")
    return Call(name=found["name"], arguments=arguments)


async def run_call(tools: Mapping[str, Tool], call: Call) -> tuple[str, bool]:
    """What a call returned as text, and whether it failed; wrong names and arguments are answered, not raised."""
    tool = tools.get(call.name)
    if tool is None:
        return f"error: there is no tool {call.name!r}; there are {', '.join(tools)}", True
    try:
        inspect.signature(tool.run).bind(**call.arguments)
    except TypeError as error:
        return f"error: {call.name}: {error}", True
    try:
        output = tool.run(**call.arguments)
        if inspect.isawaitable(output):
            output = await output
    except (ValueError, TypeError, LookupError, ArithmeticError, OSError) as error:
        return f"error: {call.name}: {type(error).__name__}: {error}", True
    return output if isinstance(output, str) else json.dumps(output, ensure_ascii=False, default=str), False
