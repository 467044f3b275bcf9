"""Turns rows with answers into experience, without sampling: what supervised fine-tuning trains on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from triune.errors import TaskError
from triune.models import ChatTokenizer
from triune.ports import AdmissionRule, Buffer, Monitor, TaskStream
from triune.records import Experience, ExperienceId, Group, GroupId, RolloutId, Source, Task, Turn

BUNDLE = 64
"""Rows that are admitted and stored at the same time, so that they share a transaction."""


class Demonstrations:
    """Stands in the explorer's place when the algorithm imitates.

    A row holds `messages` whose last one is the assistant's, or a question and an answer. Only the tokens of the last
    answer are trained on, with the end token that the template writes after it; earlier assistant turns are context.

    Args:
        tasks: Rows in training order.
        buffer: Where the experience goes, one entry a row.
        tokenizer: Chat template and stop tokens of the model.
        rule: How far ahead of the trainer rows are prepared.
        monitor: For waiting lines.
        prompt_of: Chat messages put to the model, for rows without `messages`: the workflow's own, so that what is
            imitated is what is asked later.
        answer_key: Field with the answer.
        max_tokens: Longer sequences are refused, never cut.
    """

    def __init__(
        self,
        *,
        tasks: TaskStream,
        buffer: Buffer,
        tokenizer: ChatTokenizer,
        rule: AdmissionRule,
        monitor: Monitor,
        prompt_of: Callable[[Task], list[Any]],
        answer_key: str = "answer",
        max_tokens: int = 1 << 20,
    ) -> None:
        self._tasks, self._buffer, self._tokenizer = tasks, buffer, tokenizer
        self._rule, self._monitor, self._max_tokens = rule, monitor, max_tokens
        self._prompt_of, self._answer = prompt_of, answer_key

    async def run(self) -> None:
        """Store rows until they run out or the trainer wants no more.

        consumes: Task                waits for: a free slot
        produces: one entry per row   unblocked by: the trainer's publish
        """
        await self._store([self._row_of(group) for group in await self._buffer.open_admissions()])
        cursor = await self._seek()
        drawn: list[tuple[Task, Any]] = []
        while True:
            while (again := await self._buffer.readmit(self._rule, max_retries=0)) is not None:
                await self._store([self._row_of(again)])
            while len(drawn) < BUNDLE and (entry := self._tasks.next()) is not None:
                drawn.append(entry)
            if not drawn:
                break
            with self._monitor.waiting("explorer", "a free slot"):
                groups = await self._buffer.admit_next(drawn, self._rule, after=cursor)
            if groups is None:
                break
            if groups:
                await self._store([(group, task) for group, (task, _) in zip(groups, drawn, strict=False)])
                cursor = drawn[len(groups) - 1][1]
                del drawn[: len(groups)]
            else:  # a group is due, or another process drew these rows
                cursor = await self._seek()
                drawn.clear()
        await self._buffer.end("the task sets are exhausted")

    async def _seek(self) -> Any:
        """Go to the cursor of the newest admission, and return it."""
        cursor = await self._buffer.cursor()
        self._tasks.seek(cursor)
        return cursor

    def _row_of(self, group: GroupId) -> tuple[GroupId, Task]:
        task = self._tasks.find(group.taskset, group.task_key)
        if task is None:
            raise TaskError(str(group), "its row is no longer in the task set", "the data the run started with")
        return group, task

    async def _store(self, rows: Sequence[tuple[GroupId, Task]]) -> None:
        made = [Group(id=group, task=task, records=(self.experience(group, task),)) for group, task in rows]
        await asyncio.gather(*(self._buffer.put(group, group) for group in made))

    def experience(self, group: GroupId, task: Task) -> Experience:
        """The row as one experience.

        Raises:
            TaskError: The row has no answer, or the template does not show it after the prompt.
        """
        messages = self._messages(group, task)
        prompt = self._tokenizer.prompt(messages[:-1])
        rendered = self._tokenizer.render(messages, generate=False)
        if not rendered.startswith(prompt.text):
            raise TaskError(
                str(group), "the chat template changes the prompt when an answer follows", "an appended answer"
            )
        answer = self._tokenizer.encode(rendered[len(prompt.text) :])
        ends = np.flatnonzero(np.isin(answer, self._tokenizer.stop_ids))
        if len(ends):
            answer = answer[: ends[0] + 1]
        start, length = len(prompt.ids), len(prompt.ids) + len(answer)
        if length > self._max_tokens:
            raise TaskError(
                str(group),
                f"{length} tokens",
                f"at most {self._max_tokens}",
                "shorten or filter such rows; nothing is cut",
            )
        mask = np.zeros(length, dtype=np.bool_)
        mask[start:] = True
        return Experience(
            id=ExperienceId(RolloutId(group, 0)),
            tokens=np.concatenate([prompt.ids, answer]).astype(np.int32),
            action_mask=mask,
            logprobs=np.full(length, np.nan, dtype=np.float32),
            versions=np.full(length, -1, dtype=np.int32),
            turns=(Turn(start=start, stop=length),),
            reward=0.0,
            source=Source.EXPERT,
            messages=messages,
        )

    def _messages(self, group: GroupId, task: Task) -> list[Mapping[str, Any]]:
        messages = task.data.get("messages")
        if messages is None:
            answer = task.data.get(self._answer)
            if answer is None:
                raise TaskError(
                    str(group),
                    f"the row has no {self._answer!r} (it has {', '.join(task.data)})",
                    "`messages`, or a question and an answer",
                    f"map it: `fields: {{{self._answer}: …}}`",
                )
            return [*self._prompt_of(task), {"role": "assistant", "content": str(answer)}]
        if not messages or messages[-1].get("role") != "assistant":
            raise TaskError(
                str(group), "`messages` do not end with the assistant's", "the answer to imitate as the last one"
            )
        return list(messages)
