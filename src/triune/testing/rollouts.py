"""Rollouts that need no model: every member's reward is read off a table or computed by a function."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from triune.ports import GroupOutcome, Reward, Sampling
from triune.records import Experience, ExperienceId, Group, GroupId, RolloutId, Stop, Task


class ScriptedRollouts:
    """Implements the port `Rollouts`: `answer(task, member)` gives a number, a `Reward`, or None for a failed rollout.

    Args:
        answer: What each rollout is worth.
        version: Stamped on every token.
        num_tokens: Sampled tokens of every rollout.
        latency_s: How long every group takes.

    Attributes:
        asked: (group, num, sampling, training) of every call.
        most_at_once: How many groups were running at the same time.
    """

    def __init__(
        self,
        answer: Callable[[Task, int], Any],
        *,
        version: int = 0,
        num_tokens: int = 3,
        latency_s: float = 0.0,
        stop: Stop = Stop.DONE,
    ) -> None:
        self.answer, self.version, self.num_tokens, self.latency_s, self.stop = (
            answer,
            version,
            num_tokens,
            latency_s,
            stop,
        )
        self.asked: list[tuple[GroupId, int, Sampling | None, bool]] = []
        self.most_at_once = self._running = 0

    async def run(
        self, group: GroupId, task: Task, *, num: int, sampling: Sampling | None = None, training: bool = True
    ) -> GroupOutcome:
        """Run `num` rollouts."""
        self.asked.append((group, num, sampling, training))
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        await asyncio.sleep(self.latency_s)
        self._running -= 1
        records = tuple(self._experience(group, task, member) for member in range(num))
        return GroupOutcome(group=Group(id=group, task=task, records=records))

    def _experience(self, group: GroupId, task: Task, member: int) -> Experience:
        value = self.answer(task, member)
        reward = value if isinstance(value, Reward) else Reward(total=value or 0.0, is_valid=value is not None)
        length = 2 + self.num_tokens
        mask = np.arange(length) >= 2
        return Experience(
            id=ExperienceId(RolloutId(group, member)),
            tokens=np.arange(length, dtype=np.int32),
            action_mask=mask,
            logprobs=np.where(mask, -0.5, np.nan).astype(np.float32),
            versions=np.where(mask, self.version, -1).astype(np.int32),
            reward=reward.total,
            reward_parts=reward.parts,
            is_valid=reward.is_valid,
            stop=self.stop,
        )
