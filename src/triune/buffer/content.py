"""Hashes of what records hold, to find the same one twice whoever made it; they never identify."""

from __future__ import annotations

import hashlib

import numpy as np

from triune.buffer.query_columns import experiences_of
from triune.records import Experience, Group, Record, Text, content_hash

REDACTED = "redacted"
"""Reason of an entry whose records were deleted for good."""


def record_hash(record: Record) -> str:
    """128-bit hex hash of a record's tokens and masks; of both halves of a pair."""
    if isinstance(record, Experience):
        return content_hash(record)
    digest = hashlib.blake2b(digest_size=16)
    if isinstance(record, Text):
        digest.update(np.ascontiguousarray(record.tokens, dtype="<i4").tobytes())
    else:
        digest.update("".join(content_hash(half) for half in experiences_of(record)).encode())
    return digest.hexdigest()


def record_hashes(group: Group) -> list[str]:
    """Of every record, in order."""
    return [record_hash(record) for record in group.records]


def entry_hash(group: Group) -> str:
    """128-bit hex hash of an entry's records, whatever their order and whatever they earned."""
    return hashlib.blake2b("".join(sorted(record_hashes(group))).encode(), digest_size=16).hexdigest()


def num_without_behaviour(group: Group) -> int:
    """Sequences with sampled tokens whose behaviour log-prob is unknown: only imitation learns from those."""
    sequences = [one for record in group.records for one in experiences_of(record)]
    return sum(bool((np.isnan(one.behaviour_logprobs) & one.action_mask).any()) for one in sequences)
