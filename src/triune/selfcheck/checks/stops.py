"""How answers end."""

from __future__ import annotations

from triune.ports import Sampling
from triune.records import Source, Stop
from triune.selfcheck.checks.masks import owners
from triune.selfcheck.recorder import Call
from triune.selfcheck.report import Verdict, check, failed, passed, skipped
from triune.selfcheck.rig import Rig

FIX = "compare `eos_token_id` of generation_config.json, the tokenizer's eos and the token the template writes"


@check("stops", "answers that ended have their stop token trained, and those that were cut say so")
async def stops(rig: Rig) -> Verdict:
    """Look at the last token, the length and the label of every completion, and at the record made of it."""
    if rig.is_imitation:
        return skipped("nothing is sampled: the algorithm imitates answers that are there (see `mask`)")
    calls_of, num, num_ended = await rig.calls_of(), 0, 0
    for calls in calls_of.values():
        for call in calls:
            problem = _ending(call, rig)
            if problem is not None:
                return problem
            num += 1
            num_ended += call.completion.stop is Stop.DONE
    by_rollout: dict[str, list] = {}
    for row in await rig.experiences():
        if row.source is Source.POLICY:
            by_rollout.setdefault(str(row.id.rollout), []).append(row)
    for rollout, rows in by_rollout.items():
        for row, calls in zip(rows, owners(rows, calls_of.get(rollout, []))[0], strict=True):
            for call in calls:
                end = len(call.request.prompt) + len(call.completion.tokens)
                if call.completion.stop is Stop.DONE and not row.action_mask[end - 1]:
                    return failed(
                        f"{row.id}: the answer ended by itself and its stop token is not trained",
                        "a policy that is not trained to stop learns to go on; look at the recorder and the operators",
                    )
            labels = [turn.stop_reason for turn in row.turns]
            if calls and len(labels) == len(calls):
                for label, call in zip(labels, calls, strict=True):
                    if label.is_truncated != call.completion.stop.is_truncated:
                        return failed(
                            f"{row.id}: a turn says {label.value!r} and the engine said {call.completion.stop.value!r}",
                            "an answer that was cut must say so; look at the recorder",
                        )
    hint = "" if num_ended else ": every answer was cut, so raise explorer.max_tokens if they ought to end"
    return passed(f"{num_ended} of {num} answers ended by themselves{hint}", num_ended=num_ended, num_answers=num)


def _ending(call: Call, rig: Rig) -> Verdict | None:
    tokens, sampling = call.completion.tokens.tolist(), call.request.sampling
    ids = {*rig.tokenizer.stop_ids, *sampling.stop_ids} if not sampling.ignore_eos else set(sampling.stop_ids)
    where = f"call {call.request.id}"
    early = [place for place, token in enumerate(tokens[:-1]) if token in ids]
    if early:
        return failed(f"{where}: the engine went on after the stop token at place {early[0]} of the answer", FIX)
    has_stop = bool(tokens) and (tokens[-1] in ids or _has_stop_text(tokens, sampling, rig))
    if call.completion.stop is Stop.DONE and not has_stop:
        if len(tokens) >= sampling.max_tokens:
            cause = f"says it ended by itself and was cut after {len(tokens)} tokens (explorer.max_tokens)"
        else:
            cause = "ended by itself and its stop token is not among the tokens, so it can never be trained"
        return failed(f"{where}: the answer {cause}", FIX)
    if call.completion.stop is Stop.LENGTH and len(tokens) < sampling.max_tokens:
        return failed(f"{where}: cut after {len(tokens)} of {sampling.max_tokens} tokens", "look at the engine")
    if call.completion.stop is Stop.LENGTH and has_stop:
        return failed(f"{where}: ended with a stop token and says that it was cut", "look at the engine")
    return None


def _has_stop_text(tokens: list[int], sampling: Sampling, rig: Rig) -> bool:
    if not sampling.stop:
        return False
    text = rig.tokenizer.hf.decode(tokens, skip_special_tokens=False)
    return any(stop in text for stop in sampling.stop)
