"""Small made-up groups with everything right about them, for tests of whatever stores or trains on groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from triune.records import Experience, ExperienceId, Group, GroupId, RolloutId, Source, Stop, Task, Turn


def make_experience(
    rollout: RolloutId,
    *,
    prompt: int = 4,
    answer: int = 6,
    version: int = 0,
    reward: float | None = 1.0,
    priority: float = 0.0,
    source: Source = Source.POLICY,
) -> Experience:
    """One turn: `prompt` tokens, then `answer` sampled ones; the ids depend on the rollout."""
    length = prompt + answer
    tokens = (np.arange(length, dtype=np.int32) * 7 + rollout.member * 3 + rollout.group.visit) % 97
    mask = np.arange(length) >= prompt
    return Experience(
        id=ExperienceId(rollout),
        tokens=tokens.astype(np.int32),
        action_mask=mask,
        logprobs=np.where(mask, np.float32(-0.5), np.float32(np.nan)).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        turns=(Turn(start=prompt, stop=length),),
        reward=reward,
        reward_parts={} if reward is None else {"exact": reward},
        stop=Stop.DONE,
        source=source,
        priority=priority,
        messages=({"role": "user", "content": "6 x 7?"}, {"role": "assistant", "content": "42"}),
    )


def make_group(
    group: GroupId,
    *,
    rewards: Sequence[float | None] = (1.0, 0.0),
    version: int = 0,
    attempt: int = 0,
    priority: float = 0.0,
    prompt: int = 4,
    answer: int = 6,
    source: Source = Source.POLICY,
) -> Group:
    """One experience per reward."""
    records = tuple(
        make_experience(
            RolloutId(group, member, attempt),
            prompt=prompt,
            answer=answer,
            version=version,
            reward=reward,
            priority=priority,
            source=source,
        )
        for member, reward in enumerate(rewards)
    )
    task = Task(key=group.task_key, taskset=group.taskset, data={"question": "6 x 7?", "answer": 42})
    return Group(id=group, task=task, records=records)


def with_mean_advantages(group: Group) -> Group | None:
    """Reward minus the group's mean on every action token; None when all rewards are equal. A small pipeline."""
    rewards = group.rewards
    if len(rewards) < 1 or float(np.ptp(rewards)) == 0.0:
        return None
    mean = float(rewards.mean())

    def credit(experience: Experience) -> Experience:
        value = np.float32((experience.reward or 0.0) - mean)
        advantages = np.where(experience.action_mask, value, np.float32(0)).astype(np.float32)
        return experience.with_streams(advantages=advantages).replace(operators=(*experience.operators, "advantage"))

    return group.map(credit)
