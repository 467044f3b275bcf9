"""A brick section without `use:` changes fields of the default brick."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from triune.config.plain import to_plain
from triune.settings import BrickOf


def name_default_bricks(raw: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """`algorithm: {group_size: 4}` becomes `{use: grpo, group_size: 4}` where grpo is the section's default.

    Setting one field keeps the others at the default brick's values, not at those of its class.
    """
    named = dict(raw)
    for name, value in raw.items():
        field = model.model_fields.get(name)
        if field is None or not isinstance(value, Mapping):
            continue
        if _is_brick(field):
            default = _default(field)
            if "use" not in value and default is not None:
                named[name] = {**default, **value}
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            named[name] = name_default_bricks(value, field.annotation)
    return named


def _is_brick(field: FieldInfo) -> bool:
    return any(isinstance(item, BrickOf) for item in field.metadata)


def _default(field: FieldInfo) -> dict[str, Any] | None:
    default = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(default, str):
        return {"use": default}
    if isinstance(default, Mapping) and "use" in default:
        return dict(default)
    return to_plain(default) if dataclasses.is_dataclass(default) else None
