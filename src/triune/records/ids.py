"""Identity of groups, rollouts and experiences (readable, sortable, never a content hash).

    group       run/taskset/task_key/visit
    rollout     run/taskset/task_key/visit/member.attempt
    experience  run/taskset/task_key/visit/member.attempt/policy.agent.branch

Parts are percent-encoded where they hold one of `/ . %`, so `parse` inverts `str` for any names.
"""

from __future__ import annotations

from urllib.parse import unquote

import msgspec

from triune.errors import RecordError

_ESCAPES = str.maketrans({"%": "%25", "/": "%2F", ".": "%2E"})


def _quote(part: str) -> str:
    return part.translate(_ESCAPES)


class GroupId(msgspec.Struct, frozen=True, order=True):
    """One task instance: `visit` counts epochs and repeats and is issued by the store at admission."""

    run: str
    taskset: str
    task_key: str
    visit: int

    def __str__(self) -> str:
        return f"{_quote(self.run)}/{_quote(self.taskset)}/{_quote(self.task_key)}/{self.visit}"

    @staticmethod
    def prefix_of(run: str) -> str:
        """With what the text of every id of a run begins."""
        return f"{_quote(run)}/"

    @classmethod
    def parse(cls, text: str) -> GroupId:
        """Invert `str`.

        Raises:
            RecordError: The text has not four parts, or the visit is no number.
        """
        parts = text.split("/")
        if len(parts) != 4 or not parts[3].isdigit():
            raise RecordError("group id", repr(text), "run/taskset/task_key/visit")
        run, taskset, task_key = (unquote(part) for part in parts[:3])
        return cls(run, taskset, task_key, int(parts[3]))


class RolloutId(msgspec.Struct, frozen=True, order=True):
    """One run of a workflow: a retry of a member is a new attempt; at most one attempt per member is stored."""

    group: GroupId
    member: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.group}/{self.member}.{self.attempt}"

    @classmethod
    def parse(cls, text: str) -> RolloutId:
        """Invert `str`; raises RecordError."""
        group, _, last = text.rpartition("/")
        member, _, attempt = last.partition(".")
        if not (member.isdigit() and attempt.isdigit()):
            raise RecordError("rollout id", repr(text), "run/taskset/task_key/visit/member.attempt")
        return cls(GroupId.parse(group), int(member), int(attempt))


class ExperienceId(msgspec.Struct, frozen=True, order=True):
    """One token sequence of a rollout; `branch` counts sequences that do not extend each other."""

    rollout: RolloutId
    branch: int = 0
    policy: str = "main"
    agent: str = "agent"

    def __str__(self) -> str:
        return f"{self.rollout}/{_quote(self.policy)}.{_quote(self.agent)}.{self.branch}"

    @classmethod
    def parse(cls, text: str) -> ExperienceId:
        """Invert `str`; raises RecordError."""
        rollout, _, last = text.rpartition("/")
        parts = last.split(".")
        if len(parts) != 3 or not parts[2].isdigit():
            raise RecordError("experience id", repr(text), "…/member.attempt/policy.agent.branch")
        return cls(RolloutId.parse(rollout), int(parts[2]), unquote(parts[0]), unquote(parts[1]))
