"""The base of every room's `config.py`: frozen, unknown keys forbidden, bricks by `use:`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError

from triune import registry
from triune.errors import ConfigError


class Settings(BaseModel):
    """One section of a run file. Field docstrings become the reference page, so every field has one."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, use_attribute_docstrings=True, validate_default=True
    )


class BrickOf(BeforeValidator):
    """Annotation of a field that holds a brick: `Annotated[Any, BrickOf("sink")]` reads `{use: name, field: value}`."""

    def __init__(self, kind: str) -> None:
        def read(value: Any) -> Any:
            if not isinstance(value, str | Mapping):
                return value
            try:
                return registry.build(kind, value, "")
            except ConfigError as error:
                parts = {"where": error.where, "found": error.found, "expected": error.expected, "do": error.do}
                raise PydanticCustomError("brick", "{text}", {"text": str(error).lstrip(".: "), **parts}) from error

        super().__init__(read)
        object.__setattr__(self, "kind", kind)
