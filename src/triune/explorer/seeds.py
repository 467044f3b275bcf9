"""Keys of the counter-based random numbers: every turn of every attempt has its own, and no clock enters."""

from __future__ import annotations

from hashlib import blake2b
from struct import Struct

from triune.records import GroupId

_fields = Struct("<QIII").pack


def group_seed(seed: int, group: GroupId) -> int:
    """64-bit key of a group. The run's name does not enter: two runs with one seed sample the same."""
    text = f"{seed}\0{group.taskset}\0{group.task_key}\0{group.visit}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def turn_seed(group: int, member: int, attempt: int, turn: int) -> int:
    """64-bit key of one model call, from the key of its group."""
    return int.from_bytes(blake2b(_fields(group, member, attempt, turn), digest_size=8).digest(), "little")
