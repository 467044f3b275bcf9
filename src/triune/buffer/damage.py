"""Entries whose bytes cannot be read: what is said of them."""

from __future__ import annotations

from collections.abc import Mapping

from triune.errors import StoreError

DAMAGED = "damaged"
"""Reason of an entry that was dropped because its bytes are not those that were stored."""


class Damaged(StoreError):
    """Bytes of entries are missing, or not those that were stored.

    Attributes:
        entries: Position of each → what is wrong with it.
    """

    entries: Mapping[int, str] = {}


def damaged(names: Mapping[int, str], wrong: Mapping[int, str]) -> Damaged:
    """The error for entries (position → name) and what is wrong with each."""
    first = next(iter(wrong))
    more = f", and {len(wrong) - 1} more like it" if len(wrong) > 1 else ""
    error = Damaged(
        f"entry {names.get(first, first)!r}",
        f"it cannot be read ({wrong[first]}){more}",
        "the bytes that were stored",
        "look for all damage with `triune buffer verify`, then take it out with `triune buffer gc`",
    )
    error.entries = dict(wrong)
    return error
