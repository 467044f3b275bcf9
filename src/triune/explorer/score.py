"""Rewards that need more than the answer: the conversation, the recorded tokens, or the whole group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from triune.errors import TriuneError
from triune.explorer.assemble import Finished, build_experiences
from triune.explorer.binding import BoundWorkflow
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
        return await scorer.score(task, answer, messages=_messages(session), experience=_experience(session))

    return score


def blocking(score: Callable[..., Any], loop: asyncio.AbstractEventLoop) -> Callable[..., Reward]:
    """The same for plain functions that run in a thread."""

    def wait(task: Task, answer: str) -> Reward:
        return asyncio.run_coroutine_threadsafe(score(task, answer), loop).result()

    return wait


class GroupScores:
    """Collects the answers of a group until every member that still runs has given one, then scores them together.

    A member that fails or runs into its deadline is no longer waited for.
    """

    def __init__(self, scorer: Scorer, task: Task, run: GroupRun, gate: Any = None) -> None:
        self._scorer, self._task, self._run, self._gate = scorer, task, run, gate
        self._waiting: dict[int, tuple[Session, str, asyncio.Future[Reward]]] = {}
        self._gone: set[int] = set()
        self._work: asyncio.Task[None] | None = None

    async def score(self, session: Session, answer: str) -> Reward:
        """Wait for the others; raises what the function failed with."""
        result: asyncio.Future[Reward] = asyncio.get_running_loop().create_future()
        self._waiting[session.rollout.member] = (session, answer, result)
        if self._gate is not None:
            self._gate.leave(session.name)  # it waits for its group: decoding must not wait for it
        self._check()
        return await result

    def left(self, member: int, *, again: bool = False) -> None:
        """The member's attempt ended; `again` when another one follows."""
        self._waiting.pop(member, None)
        if not again:
            self._gone.add(member)
        self._check()

    def _check(self) -> None:
        open_members = self._run.num - len(self._gone | self._waiting.keys())
        if self._waiting and open_members == 0 and self._work is None:
            self._work = asyncio.get_running_loop().create_task(self._score_all())

    async def _score_all(self) -> None:
        rows = [self._waiting[member] for member in sorted(self._waiting)]
        self._gone |= self._waiting.keys()
        self._waiting.clear()
        try:
            rewards: Sequence[Reward | TriuneError] = await self._scorer.score_group(
                self._task,
                [answer for _, answer, _ in rows],
                messages=[_messages(session) for session, _, _ in rows],
                experiences=[row for row in (_experience(session) for session, _, _ in rows) if row is not None],
            )
        except TriuneError as error:  # a judge's EngineError too: whoever waits must hear of it
            rewards = [error] * len(rows)
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


def _experience(session: Session) -> Experience | None:
    rows = build_experiences([Finished(session=session)])
    return rows[-1] if rows else None
