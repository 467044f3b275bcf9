"""What travels and what is stored: tasks, experiences, groups, and their wire format. No torch."""

from triune.records.columns import Joined
from triune.records.experience import Experience, Media, Source, Stop, Turn
from triune.records.group import Group, Pair, Record, Text
from triune.records.ids import ExperienceId, GroupId, RolloutId
from triune.records.task import Task
from triune.records.wire import WIRE_VERSION, check_plain, content_hash, decode_group, encode_group

__all__ = [
    "WIRE_VERSION",
    "Experience",
    "ExperienceId",
    "Group",
    "GroupId",
    "Joined",
    "Media",
    "Pair",
    "Record",
    "RolloutId",
    "Source",
    "Stop",
    "Task",
    "Text",
    "Turn",
    "check_plain",
    "content_hash",
    "decode_group",
    "encode_group",
]
