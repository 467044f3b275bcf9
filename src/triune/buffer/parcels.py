"""Groups on their way into the store: checked, summarised and encoded before a transaction begins."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from triune.buffer.overlay import UNSUMMED, compare, encode_overlay
from triune.buffer.summary import Summary, check_streams, mean_advantage, summarise, summarise_all
from triune.records import Group, GroupId, Joined, encode_group


class Parcel(msgspec.Struct, frozen=True, kw_only=True):
    """A put, encoded and checked before the transaction begins."""

    id: GroupId
    raw: bytes
    is_shaped: bool
    shaped: bytes | None
    is_whole: bool
    operators: tuple[str, ...]
    summary: Summary
    revision: int


def make_parcel(raw: Group, shaped: Group | None) -> Parcel:
    """Check and encode a group with its first revision; without one while a reward is not known.

    What operators made of such a group they made without knowing it all: they see it again when it is complete.

    Raises:
        RecordError: A record breaks its contract or holds something that cannot be stored.
    """
    return make_parcels([(raw, shaped)])[0]


def make_parcels(pairs: Sequence[tuple[Group, Group | None]]) -> list[Parcel]:
    """Check and encode several, each with its first revision, at once: all or none.

    Raises:
        RecordError: A record breaks its contract or holds something that cannot be stored.
    """
    found = zip(pairs, summarise_all([raw for raw, _ in pairs]), strict=True)
    return [_pack(raw, shaped, summary, joined) for (raw, shaped), (summary, joined) in found]


def _pack(raw: Group, shaped: Group | None, summary: Summary, joined: Joined | None) -> Parcel:
    raw_blob = encode_group(raw, joined)
    if shaped is None or shaped is raw or summary.is_waiting:
        return Parcel(
            id=raw.id,
            raw=raw_blob,
            is_shaped=shaped is not None,
            shaped=None,
            is_whole=False,
            operators=(),
            summary=summary,
            revision=0,
        )
    blob, is_whole, summary = encode_revision(raw, shaped, summary)
    return Parcel(
        id=raw.id,
        raw=raw_blob,
        is_shaped=True,
        shaped=blob,
        is_whole=is_whole,
        operators=operators_of(shaped),
        summary=summary,
        revision=1,
    )


def encode_revision(raw: Group, shaped: Group, of_raw: Summary) -> tuple[bytes, bool, Summary]:
    """A revision's bytes, whether they are a whole group, and what the store needs to know of it."""
    difference = compare(raw, shaped)
    if difference is None:
        return encode_group(shaped), True, summarise(shaped)._replace(attempts=of_raw.attempts)
    if difference.names <= UNSUMMED and len(shaped) == len(raw):
        check_streams(shaped.experiences)
        summary = of_raw._replace(advantage=mean_advantage(shaped.experiences))
    else:
        summary = summarise(shaped)._replace(attempts=of_raw.attempts)
    return encode_overlay(raw, shaped, difference), False, summary


def operators_of(group: Group) -> tuple[str, ...]:
    """Names of the operators that touched the group, in order of first appearance."""
    found: dict[str, None] = {}
    for record in group.records:
        for name in getattr(record, "operators", ()):
            found[name] = None
    return tuple(found)
