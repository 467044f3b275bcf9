"""Tokens in, tokens out, over the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from triune.errors import RolloutError
from triune.explorer.session import Session, Shared
from triune.ports import Sampling
from triune.records import Experience, GroupId, RolloutId
from triune.selfcheck.recorder import Call, Recorder
from triune.selfcheck.report import Verdict, check, failed, passed, skipped
from triune.selfcheck.rig import Rig

Messages = Sequence[Mapping[str, Any]]

TEMPLATE = (
    "compare model.chat_template with what the workflow sends; a template that rewrites past turns starts new sequences"
)
FOLLOW_UP = "And once more, please."
PLAYED = 2
"""Conversations of two turns that are played where the workflow has none."""


@check("turns", "prompts are what the chat template writes, and what was sampled is never tokenised again")
async def turns(rig: Rig) -> Verdict:
    """Render conversations independently; hold every later prompt against what the engine read and wrote before."""
    if rig.is_imitation:
        return skipped("nothing is sampled: the algorithm imitates answers that are there (see `mask`)")
    calls_of = await rig.calls_of()
    rows = {}
    for row in await rig.experiences():
        rows[str(row.id.rollout)] = row
    num_first, num_later, num_new = 0, 0, 0
    for rollout, calls in calls_of.items():
        row = rows[rollout]
        messages = conversation_of(calls[0], calls, row, rig)
        first = messages is not None and first_prompt(calls[0], messages, row.tools, rig)
        if isinstance(first, Verdict):
            return first
        num_first += first
        for before, after in pairwise(calls):
            found = later_prompt(before, after, rig, conversation_of(after, calls, row, rig))
            if isinstance(found, Verdict):
                return found
            num_later += found
            num_new += not found
    if not num_later:
        made = await _played(rig)
        if isinstance(made, Verdict):
            return made
        num_later += made
    new = (
        f"; {num_new} prompts were rewritten by the template or the workflow and started new sequences"
        if num_new
        else ""
    )
    return passed(
        f"{num_first} first prompts as the template writes them, {num_later} later prompts extend the sampled ids{new}",
        num_first=num_first,
        num_later=num_later,
        num_new=num_new,
    )


def conversation_of(call: Call, calls: Sequence[Call], row: Experience, rig: Rig) -> Messages | None:
    """Messages that a call was asked with, read off the rollout's whole conversation; None where it cannot be told.

    The last answers of the conversation must be those of the last calls: a workflow may talk in several threads.
    """
    answers = [place for place, message in enumerate(row.messages) if message.get("role") == "assistant"]
    later = calls[calls.index(call) :]
    if len(answers) < len(later):
        return None
    for place, one in zip(answers[-len(later) :], later, strict=True):
        if row.messages[place].get("content") != rig.tokenizer.answer(one.completion.tokens):
            return None
    return row.messages[: answers[-len(later)]]


def first_prompt(call: Call, messages: Messages, tools: Messages, rig: Rig) -> Verdict | bool:
    """Whether a prompt is what the template writes, asked past our own tokenizer."""
    hf = rig.tokenizer.hf
    text = hf.apply_chat_template(
        [dict(message) for message in messages],
        tools=[dict(tool) for tool in tools] or None,
        tokenize=False,
        add_generation_prompt=True,
    )
    wanted = np.array(hf(text, add_special_tokens=False)["input_ids"], dtype=np.int64)
    if np.array_equal(wanted, call.request.prompt):
        return True
    found = rig.tokenizer.decode(call.request.prompt)
    if found == text:
        return failed(
            f"call {call.request.id}: the prompt's text is right and its ids are not", "look at the tokenizer"
        )
    return failed(
        f"call {call.request.id}: the engine read {_end(found)!r}, and the chat template writes {_end(text)!r}",
        TEMPLATE,
    )


def later_prompt(before: Call, after: Call, rig: Rig, messages: Messages | None) -> Verdict | bool:
    """Whether a prompt extends what the engine read and wrote before; False when its text says something else."""
    said = np.concatenate([before.request.prompt, before.completion.tokens])
    prompt, tokenizer = after.request.prompt, rig.tokenizer
    if np.array_equal(prompt[: len(said)], said):
        return _added(said, after, rig, messages)
    spoken = tokenizer.decode(before.request.prompt) + tokenizer.answer(before.completion.tokens)
    if tokenizer.decode(prompt).startswith(spoken):
        return failed(
            f"call {after.request.id}: the same text in other ids: the answer of the turn before was tokenised again",
            "past turns must stay the ids that were sampled, or log-probs and gradients are of other tokens",
        )
    if messages is not None and tokenizer.render(messages).startswith(spoken):
        return failed(
            f"call {after.request.id}: the template keeps what was said, and the prompt does not: it ends "
            f"{_end(tokenizer.decode(prompt))!r}",
            TEMPLATE,
        )
    return False


def _added(said: np.ndarray, after: Call, rig: Rig, messages: Messages | None) -> Verdict | bool:
    """What stands between an answer and the next one is what the template writes there."""
    if messages is None:
        return True
    tokenizer = rig.tokenizer
    rendered, added = tokenizer.render(messages), after.request.prompt[len(said) :]
    text = tokenizer.decode(added)
    stop = tokenizer.decode(said[-1:]) if int(said[-1]) in tokenizer.stop_ids else ""
    if rendered.endswith(stop + text):
        answers = [m for m in messages if m.get("role") == "assistant"]
        last = str(answers[-1].get("content") or "") if answers else ""
        tail = rendered[: len(rendered) - len(stop + text)]
        if tail.endswith(last):
            return True
    return failed(
        f"call {after.request.id}: between two turns the engine read {text!r}, which is not what the chat template "
        f"writes there ({_end(rendered)!r})",
        TEMPLATE,
    )


async def _played(rig: Rig) -> Verdict | int:
    """Two turns on the template, where the workflow has but one; 0 when the template rewrites past turns."""
    row, messages = await _first_talk(rig)
    if row is None or messages is None:
        return 0
    made: list[Call] = []
    engine = await rig.engine()
    sampling = rig.config.explorer.sampling()
    sampling = msgspec.structs.replace(
        sampling, max_tokens=min(sampling.max_tokens, 16), stop_ids=(*sampling.stop_ids, *rig.tokenizer.stop_ids)
    )
    for member in range(PLAYED):
        session = _session(rig, Recorder(engine, made), sampling, member)
        try:
            first = await session.chat(messages, row.tools)
            talk = [*messages, {"role": "assistant", "content": first.text}, {"role": "user", "content": FOLLOW_UP}]
            await session.chat(talk, row.tools)
        except RolloutError:  # no room in the context, or a template that knows no second turn
            return 0
        session.close()
        found = later_prompt(made[-2], made[-1], rig, talk)
        if isinstance(found, Verdict):
            return found
        if not found:
            return 0
    return len(made) // 2


async def _first_talk(rig: Rig) -> tuple[Experience, Messages] | tuple[None, None]:
    """A rollout whose first call's messages are known, and these."""
    calls_of = await rig.calls_of()
    for row in await rig.experiences():
        calls = calls_of.get(str(row.id.rollout))
        messages = conversation_of(calls[0], calls, row, rig) if calls else None
        if messages:
            return row, messages
    return None, None


def _session(rig: Rig, engine: Any, sampling: Sampling, member: int) -> Session:
    group = GroupId(rig.config.name, "selfcheck", "turns", 0)
    shared = Shared(
        engine=engine,
        tokenizer=rig.tokenizer,
        sampling=sampling,
        seed=rig.config.seed + member,
        prefix="",
        max_context=engine.max_context,
        merge_turns=True,
    )
    return Session(RolloutId(group, member), shared)


def _end(text: str, num: int = 80) -> str:
    return text if len(text) <= num else f"…{text[-num:]}"
