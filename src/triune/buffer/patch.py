"""Patches: what an amendment may change in a group, and how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from triune.errors import RecordError
from triune.records import Experience, Group

_MERGED = ("reward_parts", "metrics", "info")
_REPLACED = ("reward", "is_valid", "priority")


def check_patch(patch: Mapping[str, Any], where: str) -> None:
    """Raise RecordError for a key that no amendment can change, or a value of the wrong kind."""
    allowed = (*_REPLACED, *_MERGED, "tags", "members")
    for key, value in patch.items():
        if key not in allowed:
            raise RecordError(where, f"an amendment of {key!r}", f"one of {', '.join(allowed)}")
        if key == "reward" and value is not None and not _is_number(value):
            raise RecordError(where, f"reward {value!r}", "a finite number or None")
        if key == "priority" and not _is_number(value):
            raise RecordError(where, f"priority {value!r}", "a finite number")
        if key == "is_valid" and not isinstance(value, bool):
            raise RecordError(where, f"is_valid {value!r}", "true or false")
        if key in (*_MERGED, "members") and not isinstance(value, Mapping):
            raise RecordError(where, f"{key} {value!r}", "a mapping")
        if key == "tags" and not (isinstance(value, list | tuple) and all(isinstance(tag, str) for tag in value)):
            raise RecordError(where, f"tags {value!r}", "a list of names")
    for member, part in patch.get("members", {}).items():
        if not str(member).isdigit() or not isinstance(part, Mapping) or "members" in part:
            raise RecordError(where, f"members.{member}", "a member's number with what changes for it")
        check_patch(part, f"{where}/{member}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))


def patched_members(group: Group, patch: Mapping[str, Any]) -> set[int]:
    """The members a patch speaks of: those it names, else all."""
    named = {int(member) for member in patch.get("members", {})}
    return set(group.members) if patch.keys() - {"members"} else named & group.members.keys()


def apply_patch(group: Group, patch: Mapping[str, Any]) -> Group:
    """A group with a patch's top-level fields in every experience, and those under `members` in the member's.

    `reward`, `is_valid` and `priority` are replaced, `reward_parts`, `metrics` and `info` merged, `tags` go to `info`.
    """
    common = {key: value for key, value in patch.items() if key != "members"}
    members = {int(member): part for member, part in patch.get("members", {}).items()}

    def change(experience: Experience) -> Experience:
        for part in (common, members.get(experience.member, {})):
            fields: dict[str, Any] = {key: part[key] for key in _REPLACED if key in part}
            fields |= {key: {**getattr(experience, key), **part[key]} for key in _MERGED if key in part}
            if "tags" in part:
                info = fields.get("info", experience.info)
                fields["info"] = {**info, "tags": sorted({*info.get("tags", ()), *part["tags"]})}
            if fields:
                experience = experience.replace(**fields)
        return experience

    return group.map(change)
