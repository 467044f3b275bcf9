"""Rewards that need more than the answer: the conversation, the recorded tokens, or the whole group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from triune.errors import RewardError, TriuneError
from triune.explorer.assemble import Finished, build_experiences
from triune.explorer.binding import BoundWorkflow
from triune.explorer.results import check_asked
from triune.explorer.session import Session
from triune.ports import Reward
from triune.records import Experience, Task
from triune.tasks import Scorer

if TYPE_CHECKING:
    from triune.explorer.group_run import GroupRun


def session_score(bound: BoundWorkflow, task: Task, session: Session, scores: GroupScores | None) -> Callable[..., Any]:
    """`reward(task, answer)` for one rollout whose scorer asks for messages, experience or the group."""
    assert bound.scorer is not None
    scorer = bound.scorer

    async def score(task: Task, answer: str) -> Reward:
        if scores is not None:
            return await scores.score(session, answer)
        row = _experience(session) if session.branches else None
        return await scorer.score(task, answer, messages=_messages(session), experience=row)

    return score


def blocking(score: Callable[..., Any], loop: asyncio.AbstractEventLoop) -> Callable[..., Reward]:
    """The same for plain functions that run in a thread."""

    def wait(task: Task, answer: str) -> Reward:
        return asyncio.run_coroutine_threadsafe(score(task, answer), loop).result()

    return wait


class GroupScores:
    """Collects the answers of a group until every member that still runs has given one, then scores them together.

    A member that fails or runs into its deadline is no longer waited for; `begins` is called when waiting has an end,
    as the clocks of those who waited stood still. A group is scored once: a member that has its reward is not scored
    again alone. Where scoring fails, members that are tried again are scored together again.
    """

    def __init__(self, scorer: Scorer, task: Task, run: GroupRun, gate: Any, begins: Callable[[], None]) -> None:
        self._scorer, self._task, self._run, self._gate, self._begins = scorer, task, run, gate, begins
        self._waiting: dict[int, tuple[Session, str, asyncio.Future[Reward]]] = {}
        self._gone: set[int] = set()
        self._left: set[int] = set()  # those of them that will never ask again
        self._scored: set[int] = set()
        self._work: asyncio.Task[None] | None = None

    async def score(self, session: Session, answer: str) -> Reward:
        """Wait for the others; raises what the function failed with.

        Raises:
            RewardError: The group has been scored with this member's answer.
            WorkflowError: The rollout has not asked the model.
        """
        if session.rollout.member in self._scored:
            found, expected = "it asks for its group's reward again", "one question per rollout"
            raise RewardError(f"rollout {session.name}", found, expected, "keep what the first one returned")
        check_asked(Finished(session=session), session.name)
        result: asyncio.Future[Reward] = asyncio.get_running_loop().create_future()
        self._waiting[session.rollout.member] = (session, answer, result)
        if (rollout := self._run.live.get(session.rollout.member)) is not None:
            rollout.waits_since = asyncio.get_running_loop().time()
        if self._gate is not None:
            self._gate.leave(session.name)  # it waits for its group: decoding must not wait for it
        self._check()
        return await result

    def left(self, member: int, *, again: bool = False) -> None:
        """The member's attempt ended; `again` when another one follows."""
        self._waiting.pop(member, None)
        if not again:
            self._gone.add(member)
            self._left.add(member)
        self._check()

    def has_scored(self, member: int) -> bool:
        """Whether a reward was given for the member's answer, beside those of the others."""
        return member in self._scored

    @property
    def _is_complete(self) -> bool:
        return bool(self._waiting) and len(self._gone | self._waiting.keys()) == self._run.num

    def _check(self) -> None:
        if self._is_complete and self._work is None:
            self._work = asyncio.get_running_loop().create_task(self._score_all())

    async def _score_all(self) -> None:
        if not self._is_complete:  # a member is tried again since
            self._work = None
            return
        members = set(self._waiting)
        rows = [self._waiting[member] for member in sorted(members)]
        self._gone |= members
        self._waiting.clear()
        self._begins()
        try:
            rewards: Sequence[Reward | TriuneError] = await self._scorer.score_group(
                self._task,
                [answer for _, answer, _ in rows],
                messages=[_messages(session) for session, _, _ in rows],
                experiences=[_experience(session) for session, _, _ in rows],
            )
            self._scored |= members
        except TriuneError as error:  # a judge's EngineError too: whoever waits must hear of it
            rewards = [error] * len(rows)
            self._gone -= members - self._left
        self._work = None
        for (session, _, result), reward in zip(rows, rewards, strict=True):
            if result.done():
                continue
            if self._gate is not None:
                self._gate.enter(session.name)
            if isinstance(reward, TriuneError):
                result.set_exception(reward)
            else:
                result.set_result(reward)


def _messages(session: Session) -> Any:
    return session.branches[-1].messages if session.branches else ()


def _experience(session: Session) -> Experience:
    return build_experiences([Finished(session=session)])[-1]
