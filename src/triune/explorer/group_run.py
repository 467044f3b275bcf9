"""The rollouts of one group while they run, and what they amounted to."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

from triune.explorer.assemble import Finished, build_experiences
from triune.explorer.binding import BoundWorkflow
from triune.explorer.faults import Failure, as_info
from triune.explorer.session import Session, Shared
from triune.ports import GroupOutcome, Refund
from triune.records import Group, GroupId, RolloutId, Stop, Task

_CUT = frozenset(stop for stop in Stop if stop.is_truncated)

_COUNTED = ("num_", "time/", "failed/", "refund_ratio/")
"""Beginnings of names that add up over groups or rows; a mean over rollouts must not."""


class Rollout:
    """One member: its current attempt, and the deadline that all its attempts share."""

    __slots__ = (
        "attempt",
        "deadline",
        "is_over",
        "is_timed_out",
        "member",
        "run",
        "session",
        "started",
        "task",
        "value",
        "waits_since",
    )

    def __init__(self, run: GroupRun, member: int, started: float, deadline: float) -> None:
        self.run, self.member, self.started, self.deadline = run, member, started, deadline
        self.attempt = 0
        self.is_over = self.is_timed_out = False
        self.waits_since: float | None = None  # while it waits to be scored with its group
        self.task: asyncio.Task[None] | None = None
        self.session = self.new_session()

    def new_session(self) -> Session:
        """A fresh recorder for the current attempt; what earlier attempts said is not carried on."""
        run = self.run
        name = f"{run.name}/{self.member}.{self.attempt}"
        return Session(RolloutId(run.id, self.member, self.attempt), run.shared_by(self.member), name)


class GroupRun:
    """All members of a group. `done` is set when the last one ended.

    `greedy` is what the last member's sessions share instead, where that member is to answer greedily.
    """

    def __init__(
        self,
        group: GroupId,
        task: Task,
        num: int,
        bound: BoundWorkflow,
        shared: Shared,
        name: str,
        done: asyncio.Future[None],
    ) -> None:
        self.id, self.task, self.num, self.bound, self.shared, self.name = group, task, num, bound, shared, name
        self.done = done
        self.pending = num
        self.live: dict[int, Rollout] = {}
        self.finished: dict[int, Finished] = {}
        self.failures: list[Mapping[str, Any]] = []
        self.num_failed = 0
        self.timer: asyncio.TimerHandle | None = None
        self.training = True
        self.refund: Refund | None = None
        self.scores: Any = None
        self.greedy: Shared | None = None

    def shared_by(self, member: int) -> Shared:
        """What a member's sessions share; the last one's sampling is greedy in a group that has `greedy`."""
        return self.shared if self.greedy is None or member < self.num - 1 else self.greedy

    def note_failure(self, rollout: Rollout, failure: Failure) -> None:
        """Count a failed attempt and keep what it died of."""
        self.num_failed += 1
        self.failures.append(as_info(failure, rollout.member, rollout.attempt))

    def finish(self, member: int, finished: Finished) -> None:
        """The member has ended for good."""
        self.finished[member] = finished
        self.live.pop(member, None)
        self.pending -= 1
        if self.pending == 0 and not self.done.done():
            self.done.set_result(None)

    def close(self) -> None:
        """Cancel whatever still runs; nothing is recorded any more."""
        if self.timer is not None:
            self.timer.cancel()
        for rollout in self.live.values():
            rollout.is_over = True
            rollout.session.close()
            if rollout.task is not None:
                rollout.task.cancel()
        self.live.clear()

    def outcome(self, min_group: int) -> GroupOutcome:
        """Experiences of all members, and whether enough of them are valid to train on."""
        members = [self.finished[member] for member in sorted(self.finished)]
        records = build_experiences(members)
        group = None
        if records:
            info = {"failures": self.failures} if self.failures else {}
            group = Group(id=self.id, task=self.task, records=tuple(records), info=info)
        num_valid = sum(one.is_valid for one in members)
        refund = self.refund
        if refund is None and num_valid < min_group:
            refund = Refund.TOO_SMALL if num_valid else Refund.INVALID
        return GroupOutcome(
            group=group,
            refund=refund,
            num_failed=self.num_failed,
            metrics=self._metrics(self._sampled()),
            failures=tuple(self.failures),
        )

    def _sampled(self) -> list[Finished]:
        """Members that sampled as the run does; a greedy one is a baseline and says nothing about the step."""
        last = self.num if self.greedy is None else self.num - 1
        return [self.finished[member] for member in sorted(self.finished) if member < last]

    def _metrics(self, members: list[Finished]) -> Mapping[str, float]:
        num = max(1, len(members))
        num_valid = sum(one.is_valid for one in members)
        rewards, length, truncated, turns, has_parts = [], 0, 0, 0, False
        for one in members:
            session, reward = one.session, one.reward
            turns += session.num_turns
            is_cut = one.stop in _CUT or session.stop in _CUT
            for branch in session.branches:
                for turn in branch.turns:
                    length += turn[2] - turn[1]
                    is_cut = is_cut or turn[3] in _CUT
            truncated += is_cut
            if reward is not None and reward.is_valid:
                rewards.append(reward.total)
                has_parts = has_parts or bool(reward.parts or reward.metrics or session.metrics)
        found = {
            "response_length": length / num,
            "truncated_ratio": truncated / num,
            "turns": turns / num,
            "num_failed": float(self.num_failed),
            "invalid_ratio": 1.0 - num_valid / num,
        }
        if rewards:
            mean = sum(rewards) / len(rewards)
            found["reward"] = mean
            found["reward_std"] = math.sqrt(sum([(reward - mean) ** 2 for reward in rewards]) / len(rewards))
            found["flat_group_ratio"] = float(max(rewards) - min(rewards) < 1e-9)
        for failure in self.failures:
            name = f"failed/{failure['boundary']}"
            found[name] = found.get(name, 0.0) + 1.0
        if has_parts:
            self._add_parts(found, members, len(rewards))
        return found

    def _add_parts(self, found: dict[str, float], members: list[Finished], num: int) -> None:
        """Means of reward parts, and of what workflows and rewards noted: under `user/` where the name is ours."""
        noted: dict[str, float] = {}
        for one in members:
            reward = one.reward
            if reward is None or not reward.is_valid:
                continue
            for name, value in reward.parts.items():
                name = f"reward/{name}"
                found[name] = found.get(name, 0.0) + value / num
            for values in (reward.metrics, one.session.metrics):
                for name, value in (values or {}).items():
                    noted[name] = noted.get(name, 0.0) + value / num
        for name, value in noted.items():
            is_ours = name in found or name.startswith(_COUNTED)
            found[f"user/{name}" if is_ours else name] = value
