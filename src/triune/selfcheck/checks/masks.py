"""The mask against what the engine handed out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from triune.records import Experience, Source
from triune.selfcheck.recorder import Call
from triune.selfcheck.report import Verdict, check, failed, passed, skipped
from triune.selfcheck.rig import Rig, experiences_of

ASSEMBLY = (
    "the recorder (explorer) or an operator that edits tokens; a workflow of your own must not edit what it records"
)


@check("mask", "the action mask holds exactly the tokens that were sampled, with their log-probs")
async def mask(rig: Rig) -> Verdict:
    """Every completion that left the engine is in one experience, trained there, and nothing else is."""
    if rig.is_imitation:
        return await _demonstrations(rig)
    calls_of, num_tokens = await rig.calls_of(), 0
    by_rollout: dict[str, list[Experience]] = {}
    for row in await rig.experiences():
        if row.source is Source.POLICY:
            by_rollout.setdefault(str(row.id.rollout), []).append(row)
    if not by_rollout:
        return skipped("no experience was sampled by the policy")
    for rollout, rows in by_rollout.items():
        owned, orphans = owners(rows, calls_of.get(rollout, []))
        problem = _orphan(orphans, rows, rig)
        for number, row in enumerate(rows):
            problem = problem or _compare(row, owned[number], rig)
        if problem is not None:
            return problem
        num_tokens += sum(row.num_actions for row in rows)
    return passed(f"{num_tokens} sampled tokens, and no other, are trained", num_tokens=num_tokens)


def owners(rows: Sequence[Experience], calls: Sequence[Call]) -> tuple[list[list[Call]], list[Call]]:
    """Calls of each experience: the first one, in order of branches, that begins with prompt and completion.

    Returns:
        Calls by position in `rows`, and calls that no experience holds.
    """
    owned: list[list[Call]] = [[] for _ in rows]
    orphans = []
    for call in calls:
        said = np.concatenate([call.request.prompt, call.completion.tokens])
        place = next((n for n, row in enumerate(rows) if np.array_equal(row.tokens[: len(said)], said)), None)
        if place is None:
            orphans.append(call)
        else:
            owned[place].append(call)
    return owned, orphans


def _orphan(orphans: Sequence[Call], rows: Sequence[Experience], rig: Rig) -> Verdict | None:
    if not orphans:
        return None
    call = orphans[0]
    asked = rig.tokenizer.decode(call.request.prompt)
    same_text = any(rig.tokenizer.decode(row.tokens[row.tokens >= 0]).startswith(asked) for row in rows)
    if same_text:
        cause = "the record holds the same text in other ids than the engine read: past turns are tokenised again"
    else:
        cause = "no experience begins with the prompt that the engine read and what it answered"
    return failed(f"call {call.request.id}: {cause}", f"look at {ASSEMBLY}")


def _compare(row: Experience, calls: Sequence[Call], rig: Rig) -> Verdict | None:
    """What is wrong with one experience's mask, log-probs or versions."""
    truth = np.zeros(len(row), dtype=np.bool_)
    logprobs = np.full(len(row), np.nan, dtype=np.float32)
    for call in calls:
        start, stop = len(call.request.prompt), len(call.request.prompt) + len(call.completion.tokens)
        truth[start:stop] = True
        logprobs[start:stop] = call.completion.logprobs
    if np.array_equal(truth, row.action_mask):
        if np.array_equal(logprobs[truth], row.logprobs[truth]):
            return None
        return failed(
            f"{row.id}: log-probs are not those that the engine gave with the tokens{_shift(logprobs, row.logprobs)}",
            f"entry t of `logprobs` speaks of token t; look at {ASSEMBLY}",
        )
    return failed(f"{row.id}: {mask_cause(row, truth, calls, rig)}", f"look at {ASSEMBLY}")


def mask_cause(row: Experience, truth: np.ndarray, calls: Sequence[Call], rig: Rig) -> str:
    """How a mask differs from the truth, in words."""
    found = row.action_mask
    for step in (1, -1):
        if np.array_equal(np.roll(truth, step)[1:-1], found[1:-1]):
            return f"the mask is shifted by one token to the {'right' if step > 0 else 'left'}"
    extra, missing = np.flatnonzero(found & ~truth), np.flatnonzero(truth & ~found)
    first = min((len(call.request.prompt) for call in calls), default=len(row))
    said = []
    if len(extra):
        kind = "prompt tokens" if (extra < first).any() else "tokens the model only read"
        said.append(f"{len(extra)} {kind} are trained, the first {_token(row, extra[0], rig)}")
    if len(missing):
        ends = {len(call.request.prompt) + len(call.completion.tokens) - 1 for call in calls}
        is_end = set(missing.tolist()) <= ends
        kind = "end tokens of answers (the sampled stop token)" if is_end else "sampled tokens"
        said.append(f"{len(missing)} {kind} are not trained, the first {_token(row, missing[0], rig)}")
    return " and ".join(said)


def _shift(truth: np.ndarray, found: np.ndarray) -> str:
    both = np.flatnonzero(~np.isnan(truth) & ~np.isnan(found))
    for step in (1, -1):
        rolled = np.roll(truth, step)
        inner = both[(both - step >= 0) & (both - step < len(truth))]
        inner = inner[~np.isnan(rolled[inner])]
        if len(inner) > 1 and np.array_equal(rolled[inner], found[inner]):
            return ": they are shifted by one token"
    return ""


def _token(row: Experience, place: int, rig: Rig) -> str:
    return f"{rig.tokenizer.decode(row.tokens[place : place + 1])!r} at {place}"


async def _demonstrations(rig: Rig) -> Verdict:
    """The trained tokens of a demonstration spell the last answer and its end token."""
    stops, num_tokens = set(rig.tokenizer.stop_ids), 0
    rows = [row for one in await rig.groups() for row in experiences_of(one.raw)]
    if not rows:
        return skipped("the groups hold no experience (texts have no answers)")
    for row in rows:
        places = np.flatnonzero(row.action_mask)
        if not len(places) or not row.messages:
            return skipped("the rows hold no messages")
        if not np.array_equal(places, np.arange(places[0], len(row))):
            return failed(f"{row.id}: trained tokens are not the end of the sequence", "look at the demonstrations")
        answer = row.tokens[places]
        text = rig.tokenizer.answer(answer)
        wanted = str(row.messages[-1].get("content") or "")
        if wanted.strip() not in text:
            return failed(
                f"{row.id}: {text!r} is trained where the answer is {wanted!r}",
                "the chat template must write an answer after the prompt as it is",
            )
        prompt = rig.tokenizer.render(row.messages[:-1], row.tools)
        if rig.tokenizer.decode(row.tokens[: places[0]]) != prompt:
            return failed(f"{row.id}: tokens of the prompt are trained", "look at the chat template")
        if int(answer[-1]) not in stops:
            return failed(
                f"{row.id}: the end token of the answer is not trained",
                "a model that never sees an end never stops: let the chat template close the assistant's message",
            )
        num_tokens += len(places)
    return passed(f"{num_tokens} tokens of answers with their end, and no other, are trained", num_tokens=num_tokens)
