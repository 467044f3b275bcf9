"""What was measured: per task, per task set, as metrics and as rows of `eval.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from triune.errors import ConfigError
from triune.evaluation.estimators import best_at_k, mean_interval, pass_at_k, tries_up_to
from triune.records import Group, Task

_ROUNDING = 1e-9
"""Below `pass_threshold` by so little still passes."""


class TaskResult(msgspec.Struct, frozen=True, kw_only=True):
    """All samples of one task.

    Attributes:
        key: The task's.
        rewards: One for each valid sample.
        num_invalid: Samples whose workflow or verifier failed; in no mean, but counted.
        num_truncated: Valid samples that did not end by themselves.
        num_tokens: Sampled tokens of the valid samples together; padding does not exist here.
        parts: Mean of every raw reward part.
    """

    key: str
    rewards: tuple[float, ...]
    num_invalid: int = 0
    num_truncated: int = 0
    num_tokens: int = 0
    parts: Mapping[str, float] = {}


class SetResult(msgspec.Struct, frozen=True, kw_only=True):
    """All tasks of one set, in the order of its rows."""

    taskset: str
    weight: float
    samples: int
    pass_threshold: float
    tasks: tuple[TaskResult, ...]

    def metrics(self) -> dict[str, float]:
        """Name → value, without prefix; a metric that no task can tell is left out.

        `mean@n`, and `best@k` and `pass@k` for k = 1, 2, 4 … n over the tasks with at least k valid samples, each with
        its 95 % interval over tasks `…/low` and `…/high` where there are two or more; `part/<name>`; `num_tasks`,
        `invalid_ratio`, `truncated_ratio`, `response_length`.
        """
        scored = [task.rewards for task in self.tasks if task.rewards]
        num_valid = sum(map(len, scored))
        num_invalid = sum(task.num_invalid for task in self.tasks)
        found = {"num_tasks": float(len(self.tasks)), "invalid_ratio": num_invalid / max(1, num_valid + num_invalid)}
        if not scored:
            return found
        means = [float(np.mean(rewards)) for rewards in scored]
        name = f"mean@{self.samples}"
        found |= _with_interval(name, means)
        for k in tries_up_to(self.samples):
            enough = [rewards for rewards in scored if len(rewards) >= k]
            if enough:
                found |= _with_interval(f"best@{k}", [best_at_k(rewards, k) for rewards in enough])
                found |= _with_interval(f"pass@{k}", [pass_at_k(len(r), self._num_passed(r), k) for r in enough])
        found["truncated_ratio"] = sum(task.num_truncated for task in self.tasks) / num_valid
        found["response_length"] = sum(task.num_tokens for task in self.tasks) / num_valid
        return found | self._part_means()

    def _num_passed(self, rewards: Sequence[float]) -> int:
        """A sum of weights that make 1 may miss it by a rounding, and passes."""
        return sum(reward >= self.pass_threshold - _ROUNDING for reward in rewards)

    def _part_means(self) -> dict[str, float]:
        values: dict[str, list[float]] = {}
        for task in self.tasks:
            for name, value in task.parts.items():
                values.setdefault(name, []).append(value)
        return {f"part/{name}": float(np.mean(each)) for name, each in values.items()}


def _with_interval(name: str, per_task: Sequence[float]) -> dict[str, float]:
    found = {name: float(np.mean(per_task))}
    if len(per_task) > 1:
        found[f"{name}/low"], found[f"{name}/high"] = mean_interval(per_task)
    return found


def result_of_group(task: Task, group: Group | None, *, samples: int, part: str | None) -> TaskResult:
    """Read one task's rollouts.

    Args:
        task: What was asked for.
        group: What came back; rollouts it lacks count as invalid.
        samples: How many rollouts were asked for.
        part: Reward part to measure instead of the total.

    Raises:
        ConfigError: A valid rollout has no such part.
    """
    valid = {} if group is None else group.valid_members
    rewards, parts = [], []
    for rows in valid.values():
        parts.append(rows[-1].reward_parts)
        total = rows[-1].reward
        assert total is not None, "a valid member has a reward"
        rewards.append(total if part is None else part_of(parts[-1], part, task))
    return TaskResult(
        key=task.key,
        rewards=tuple(rewards),
        num_invalid=samples - len(rewards),
        num_truncated=sum(rows[-1].stop.is_truncated for rows in valid.values()),
        num_tokens=sum(row.num_actions for rows in valid.values() for row in rows),
        parts=mean_parts(parts),
    )


def part_of(parts: Mapping[str, float], name: str, task: Task) -> float:
    """One raw part of a reward.

    Raises:
        ConfigError: There is no such part.
    """
    if name not in parts:
        found = f"the reward of task {task.taskset}/{task.key} has no part {name!r}"
        raise ConfigError("eval.part", found, f"one of {', '.join(parts) or 'none: the reward has no parts'}")
    return parts[name]


def mean_parts(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of every part over the samples that have it."""
    names = dict.fromkeys(name for each in parts for name in each)
    return {name: float(np.mean([each[name] for each in parts if name in each])) for name in names}


def overall_reward(results: Sequence[SetResult]) -> float | None:
    """Mean reward over sets, weighted by their weights; None when nothing valid was measured."""
    means = [(each.weight, each.metrics().get(f"mean@{each.samples}")) for each in results]
    known = [(weight, mean) for weight, mean in means if mean is not None]
    return sum(weight * mean for weight, mean in known) / sum(weight for weight, _ in known) if known else None
