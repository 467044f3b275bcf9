"""Makes records of rows that hold answers, so that nothing has to be sampled."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from triune.errors import TaskError
from triune.models import ChatTokenizer
from triune.records import Experience, ExperienceId, GroupId, Pair, Record, RolloutId, Source, Task, Text, Turn
from triune.shapes import TokensT

Message = Mapping[str, Any]


class RowReader:
    """Turns a row into the records of one entry, as the algorithm reads them (`Algorithm.reads`).

    answers: `messages` that end with the assistant's, or a question and an `answer`.
    labels:  the same (`prompt` may stand for the question), and a true or false `label`.
    pairs:   `chosen` and `rejected`, each text or chat messages, with `prompt` (text or messages), or the question, or
             the whole conversation in both; `weight` and `margin` may be there.
    texts:   `text`.

    Only the tokens of an answer, the last message, are trained on, with the end token that the template writes after
    it; what stands before is context.

    Args:
        tokenizer: Chat template and stop tokens of the model.
        prompt_of: Chat messages put to the model, for rows without messages or `prompt`: the workflow's own, so that
            what is learned is what is asked later.
        reads: Which of the four.
        answer_key: Field with the answer.
        max_tokens: Longer sequences are refused, never cut; texts are cut into pieces.
    """

    def __init__(
        self,
        *,
        tokenizer: ChatTokenizer,
        prompt_of: Callable[[Task], list[Any]],
        reads: str = "answers",
        answer_key: str = "answer",
        max_tokens: int = 1 << 20,
    ) -> None:
        self._tokenizer, self._prompt_of, self._answer = tokenizer, prompt_of, answer_key
        self.max_tokens = max_tokens
        self._read: Callable[[GroupId, Task], Sequence[Record]] = getattr(self, f"_{reads}")

    def __call__(self, group: GroupId, task: Task) -> tuple[Record, ...]:
        """The row's records.

        Raises:
            TaskError: It lacks what is read, or the template does not show an answer after its prompt.
        """
        return tuple(self._read(group, task))

    def answer(self, group: GroupId, task: Task) -> Experience:
        """The row as one answer to imitate."""
        return self._sequence(group, self._conversation(group, task))

    # ------------------------------------------------------------------------------------------ four kinds of row

    def _answers(self, group: GroupId, task: Task) -> list[Experience]:
        return [self.answer(group, task)]

    def _labels(self, group: GroupId, task: Task) -> list[Experience]:
        label = _field(group, task, "label", "true or false: whether the answer is desirable")
        if label not in (True, False):  # 1 and 0 are equal to them
            raise TaskError(str(group), f"label is {label!r}", "true or false", "write whether the answer is desirable")
        has_prompt = "messages" not in task.data and "prompt" in task.data
        conversation = (
            [*_messages(group, task, "prompt", "user"), self._said(group, task)]
            if has_prompt
            else self._conversation(group, task)
        )
        return [self._sequence(group, conversation).replace(reward=float(label))]

    def _pairs(self, group: GroupId, task: Task) -> list[Pair]:
        chosen, rejected = (
            _messages(group, task, name, "assistant", "an answer: text, or chat messages")
            for name in ("chosen", "rejected")
        )
        if all(half[0].get("role") == "assistant" for half in (chosen, rejected)):
            prompt = _messages(group, task, "prompt", "user") if "prompt" in task.data else self._prompt_of(task)
            chosen, rejected = [*prompt, *chosen], [*prompt, *rejected]
        if chosen[:-1] != rejected[:-1]:
            raise TaskError(
                str(group),
                "`chosen` and `rejected` differ before their last message",
                "two answers to one prompt",
                "put what they share into `prompt`, and only the answers into the halves",
            )
        for name, half in (("chosen", chosen), ("rejected", rejected)):
            _check_end(group, half, name)
        better = self._sequence(group, chosen).replace(reward=1.0)
        worse = self._sequence(group, rejected, member=1)
        weight, margin = (_number(group, task, name, default) for name, default in (("weight", 1.0), ("margin", 0.0)))
        if weight < 0:
            raise TaskError(str(group), f"weight is {weight:g}", "0 or more", "swap the halves, and drop the sign")
        return [Pair(chosen=better, rejected=worse, weight=weight, margin=margin)]

    def _texts(self, group: GroupId, task: Task) -> list[Text]:
        text = _field(group, task, "text", "plain text")
        ids = self._tokenizer.plain_text(str(text))
        if len(ids) < 2:
            raise TaskError(str(group), f"text is {text!r}", "more than one token", "filter empty rows")
        step = self.max_tokens - 1  # a piece begins with the last token of the one before: only that one is untrained
        return [
            Text(id=f"{group}/{number}", tokens=ids[start : start + self.max_tokens])
            for number, start in enumerate(range(0, len(ids) - 1, step))
        ]

    # ------------------------------------------------------------------------------------------- conversations

    def _conversation(self, group: GroupId, task: Task) -> list[Message]:
        if task.data.get("messages") is None:
            return [*self._prompt_of(task), self._said(group, task)]
        messages = list(task.data["messages"])
        _check_end(group, messages, "messages")
        return messages

    def _said(self, group: GroupId, task: Task) -> Message:
        answer = _field(group, task, self._answer, "`messages`, or a question and an answer")
        return {"role": "assistant", "content": str(answer)}

    def _sequence(self, group: GroupId, messages: list[Message], member: int = 0) -> Experience:
        """A conversation as a sequence of which the last message is trained."""
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
        if length > self.max_tokens:
            raise TaskError(
                str(group),
                f"{length} tokens",
                f"at most {self.max_tokens}",
                "shorten or filter such rows; nothing is cut",
            )
        mask = np.zeros(length, dtype=np.bool_)
        mask[start:] = True
        tokens: TokensT = np.concatenate([prompt.ids, answer]).astype(np.int32)
        return Experience(
            id=ExperienceId(RolloutId(group, member)),
            tokens=tokens,
            action_mask=mask,
            logprobs=np.full(length, np.nan, dtype=np.float32),
            versions=np.full(length, -1, dtype=np.int32),
            turns=(Turn(start=start, stop=length),),
            reward=0.0,
            source=Source.EXPERT,
            messages=messages,
        )


def _field(group: GroupId, task: Task, name: str, expected: str) -> Any:
    value = task.data.get(name)
    if value is None:
        raise TaskError(
            str(group),
            f"the row has no {name!r} (it has {', '.join(task.data)})",
            expected,
            f"map it: `fields: {{{name}: …}}`",
        )
    return value


def _messages(group: GroupId, task: Task, name: str, role: str, expected: str = "text, or chat messages") -> list[Any]:
    """A field with text or chat messages as chat messages; text is what `role` said."""
    value = _field(group, task, name, expected)
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, list) and value and all(isinstance(each, Mapping) and "role" in each for each in value):
        return list(value)
    raise TaskError(str(group), f"{name} is {value!r:.80}", expected, f"map another field: `fields: {{{name}: …}}`")


def _check_end(group: GroupId, messages: Sequence[Message], name: str) -> None:
    if not messages or messages[-1].get("role") != "assistant":
        raise TaskError(str(group), f"`{name}` do not end with the assistant's", "the answer as the last message")


def _number(group: GroupId, task: Task, name: str, default: float) -> float:
    value = task.data.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TaskError(str(group), f"{name} is {value!r}", "a number", f"map another field: `fields: {{{name}: …}}`")
    return float(value)
