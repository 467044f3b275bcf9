"""What a workflow returned: a reward, or experiences of its own making."""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Any

import msgspec

from triune.errors import RecordError, RewardError, WorkflowError
from triune.explorer.assemble import Finished
from triune.explorer.session import Session
from triune.ports import Reward
from triune.records import Experience, ExperienceId, Task, check_plain
from triune.tasks import to_reward

_PLAIN_OF = attrgetter("info", "messages", "tools", "metrics", "reward_parts", "parents", "operators", "turns")


def read_result(value: Any, finished: Finished, task: Task, name: str) -> None:
    """Write what a workflow returned into `finished`.

    Raises:
        RewardError: It is neither a finite reward nor a list of well-formed experiences; names the task.
    """
    if type(value) is Reward and _is_plain(value):
        finished.reward = value
        return
    where = f"task {task.taskset}/{task.key}, rollout {name}"
    rows = [value] if isinstance(value, Experience) else value
    if isinstance(rows, (list, tuple)) and rows and all(isinstance(row, Experience) for row in rows):
        finished.experiences = _checked(rows, finished, where)
        first = finished.experiences[0]
        if first.reward is not None and first.is_valid:
            finished.reward = Reward(total=first.reward, parts=first.reward_parts)
        return
    try:
        finished.reward = to_reward(value, where)
    except (TypeError, ValueError, AttributeError) as error:  # fields may be of any type
        raise RewardError(where, f"a malformed reward ({error})", "finite numbers") from error
    if not finished.reward.is_valid:
        raise RewardError(where, "the reward function could not score the answer", "a verdict")


def drop_odd_values(session: Session) -> None:
    """Forget messages and notes that no store can keep, so that the tokens beside them can be.

    Raises:
        WorkflowError: There were some; the rollout is invalid.
    """
    where = f"rollout {session.name}"
    try:
        check_plain([(branch.messages, branch.tools) for branch in session.branches], f"{where}, messages")
        check_plain(session.turn_rewards, f"{where}, notes about turns")
    except RecordError as error:
        for branch in session.branches:
            branch.messages = branch.tools = ()
        session.turn_rewards = None
        raise WorkflowError(error.where, error.found, error.expected) from error


def check_asked(finished: Finished, name: str) -> None:
    """Raise WorkflowError for a reward of nothing: a rollout without a model call has no token to learn from."""
    if finished.experiences is None and not any(branch.length for branch in finished.session.branches):
        raise WorkflowError(
            f"rollout {name}",
            "a reward without asking the model",
            "at least one answer of the model",
            "ask it, or keep such tasks out of the task set",
        )


def _is_plain(reward: Reward) -> bool:
    """Whether there is nothing to look at more closely, as in most rewards of a run."""
    is_bare = reward.is_valid and reward.parts == {} == reward.metrics
    return is_bare and type(reward.total) is float and math.isfinite(reward.total)


def _checked(rows: Any, finished: Finished, where: str) -> list[Experience]:
    rollout = finished.session.rollout
    named = [
        msgspec.structs.replace(row, id=ExperienceId(rollout, number, row.id.policy, row.id.agent))
        for number, row in enumerate(rows)
    ]
    try:
        for row in named:
            row.check()
            check_plain(_PLAIN_OF(row), "its plain fields")
    except (RecordError, TypeError, ValueError, AttributeError) as error:  # fields may be of any type
        raise RewardError(where, f"an experience that is malformed ({error})") from error
    if any(row.reward != named[0].reward for row in named):
        raise RewardError(where, "experiences of one rollout with different rewards", "one reward, the rollout's")
    return named
