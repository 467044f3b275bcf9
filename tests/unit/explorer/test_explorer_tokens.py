"""Token-in, token-out: what is recorded is what was sampled, byte for byte."""

from __future__ import annotations

import asyncio
import re

import numpy as np
import pytest
from explorer_fakes import Talker, completion, make_scheduler, run_group, tokenizer

from triune.errors import ConfigError
from triune.explorer.faults import ContextFull
from triune.models import ChatTokenizer
from triune.records import Stop
from triune.testing import chats

END = "<|im_end|>"


async def two_questions(task, model):
    chat = model.chat(system="s")
    await chat.ask("one")
    await chat.ask("two")
    return 1.0


def rows_of(said, kind="append_only", workflow=two_questions, **settings):
    answers = iter(said)
    outcome = run_group(make_scheduler(workflow, lambda request, text: next(answers), kind=kind, **settings), 1)
    return outcome.group.experiences


def sampled(row, tok):
    return tok.decode(row.tokens[row.action_mask])


def test_case_10_ids_that_do_not_survive_decoding_are_trained_as_they_were_sampled():
    tok = tokenizer()
    broken = np.array([*tok.encode("\u00e9")[:1], *tok.encode("7" + END)], dtype=np.int32)  # half of a letter
    assert len(tok.encode(tok.decode(broken))) != len(broken)
    (row,) = rows_of([completion(broken), "8" + END])
    first = row.turns[0]
    assert row.tokens[first.start : first.stop].tolist() == broken.tolist()
    assert len(row.turns) == 2
    assert row.logprobs[first.start : first.stop].tolist() == [-1.0, -2.0, -3.0]


def test_case_11_a_template_that_strips_past_thinking_starts_a_new_experience():
    first, second = rows_of([f"<think>hm</think>A{END}", f"<think>ho</think>B{END}"], "strips")
    tok = tokenizer("strips")
    assert sampled(first, tok) == f"<think>hm</think>A{END}"
    assert sampled(second, tok) == f"<think>ho</think>B{END}"
    assert "<think>hm" not in tok.decode(second.tokens)
    assert [row.id.branch for row in (first, second)] == [0, 1]
    assert first.reward == second.reward == 1.0


def test_case_11_an_append_only_template_keeps_all_turns_in_one_experience_equal_to_its_own_rendering():
    tok = tokenizer()
    (row,) = rows_of([f"<think>hm</think>A{END}", f"B{END}"])
    assert len(row.turns) == 2
    assert tok.decode(row.tokens) == tok.render(row.messages, generate=False).removesuffix("\n")
    assert row.tokens.tolist() == tok.encode(tok.decode(row.tokens)).tolist()


def test_case_12_the_mask_is_exactly_the_sampled_tokens_with_their_stop_token():
    tok = tokenizer()
    (row,) = rows_of([f"A{END}", f"BC{END}"])
    assert sampled(row, tok) == f"A{END}BC{END}"
    text = tok.decode(row.tokens)
    assert text.count(END) == 5  # system, two questions, two answers: only the answers' are sampled
    outside = ~row.action_mask
    assert np.isnan(row.logprobs[outside]).all()
    assert (row.versions[outside] == -1).all()
    assert not np.isnan(row.logprobs[row.action_mask]).any()
    row.check()


def test_case_12_an_answer_cut_by_length_gets_the_templates_end_as_context():
    tok = tokenizer()
    (row,) = rows_of(["A", f"B{END}"])
    assert sampled(row, tok) == f"AB{END}"
    assert tok.decode(row.tokens).endswith(
        f"assistant\nA{END}\n<|im_start|>user\ntwo{END}\n<|im_start|>assistant\nB{END}"
    )


def test_case_13_pad_id_equal_to_eos_id_does_not_change_the_mask():
    hf = chats.byte_tokenizer(pad="<|im_end|>")
    assert hf.pad_token_id == hf.eos_token_id
    tok = ChatTokenizer(hf)
    answers = iter([f"A{END}", f"B{END}"])
    engine = Talker(tok, lambda request, text: next(answers))
    (row,) = run_group(make_scheduler(two_questions, engine=engine), 1).group.experiences
    assert (row.tokens[row.action_mask] == hf.pad_token_id).sum() == 2


def test_case_12_both_stop_tokens_of_a_model_end_an_answer():
    tok = tokenizer("two_stops")
    assert {tok.decode(np.array([i], dtype=np.int32)) for i in tok.stop_ids} == {"<|endoftext|>", END}
    (row,) = rows_of([f"A{END}", "B<|endoftext|>"], "two_stops")
    assert sampled(row, tok) == f"A{END}B<|endoftext|>"


def test_an_answer_ended_by_another_token_than_the_template_writes_is_not_patched_up():
    tok = tokenizer("two_stops")
    first, second = rows_of(["A<|endoftext|>", f"B{END}"], "two_stops")
    assert sampled(first, tok) == "A<|endoftext|>"
    assert "<|endoftext|>" not in tok.decode(second.tokens)


async def quotes_an_assistant(task, model):
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "old"}, {"role": "user", "content": "y"}]
    await model.generate(said)
    return 0.0


def test_case_15_assistant_turns_inside_the_prompt_are_not_trained():
    (row,) = rows_of([f"new{END}"], workflow=quotes_an_assistant)
    assert "old" in tokenizer().decode(row.tokens)
    assert sampled(row, tokenizer()) == f"new{END}"


async def fills_the_context(task, model):
    chat = model.chat()
    await chat.ask("one")
    chat.observe("x" * 200)
    await chat.ask("two")
    return 1.0


def small_context(workflow, positions=120, **settings):
    tok = tokenizer()
    engine = Talker(tok, lambda request, text: "A" * min(30, request.sampling.max_tokens))
    engine.max_context = positions
    return run_group(make_scheduler(workflow, engine=engine, **settings), 1)


def test_case_16_a_tool_output_that_overflows_the_context_is_counted_and_kept_as_invalid():
    outcome = small_context(fills_the_context)
    (row,) = outcome.group.experiences
    assert row.stop is Stop.CONTEXT
    assert not row.is_valid
    assert outcome.metrics["failed/context"] == 1.0
    assert outcome.num_failed == 1  # the same conversation would overflow again, so there is no second attempt
    assert "120 positions" in outcome.group.info["failures"][0]["error"]


async def catches_the_overflow(task, model):
    try:
        return await fills_the_context(task, model)
    except ContextFull:
        return 0.25


def test_case_16_a_workflow_may_keep_what_it_reached_before_the_overflow():
    outcome = small_context(catches_the_overflow)
    (row,) = outcome.group.experiences
    assert (row.stop, row.reward, row.is_valid) == (Stop.CONTEXT, 0.25, True)
    assert outcome.metrics["truncated_ratio"] == 1.0


async def one_question(task, model):
    await model.chat().ask("one")
    return 1.0


def test_case_16_case_60_an_answer_is_cut_at_the_last_position_and_says_context():
    outcome = small_context(one_question, positions=45)
    (row,) = outcome.group.experiences
    assert len(row) == 45
    assert row.stop is Stop.CONTEXT
    assert row.turns[0].stop_reason is Stop.CONTEXT


def test_case_60_an_answer_cut_by_max_tokens_says_length_on_every_path():
    async def by_chat(task, model):
        await model.chat().ask("x")
        return 1.0

    async def by_messages(task, model):
        await model.generate([{"role": "user", "content": "x"}])
        return 1.0

    async def by_ids(task, model):
        await model.generate(np.array([1, 2, 3]))
        return 1.0

    async def by_text(task, model):
        await model.generate("x")
        return 1.0

    def in_a_thread(task, model):
        model.chat().ask("x")
        return 1.0

    for workflow in (by_chat, by_messages, by_ids, by_text, in_a_thread):
        outcome = run_group(make_scheduler(workflow, "A" * 50, max_tokens=5), 1)
        (row,) = outcome.group.experiences
        assert row.stop is Stop.LENGTH, workflow
        assert row.turns[0].stop_reason is Stop.LENGTH
        assert outcome.metrics["truncated_ratio"] == 1.0


def test_case_17_arguments_as_text_or_object_give_the_prompt_of_deployment():
    tok = tokenizer()
    given = {"b": 2, "a": [1, {"z": 0, "y": "\u00e9<"}]}
    text = '{"b": 2, "a": [1, {"z": 0, "y": "\u00e9<"}]}'

    def said(arguments):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]

    deployed = tok.hf.apply_chat_template(said(given), tokenize=True, add_generation_prompt=True, return_dict=False)
    assert tok.prompt(said(given)).ids.tolist() == deployed
    assert tok.prompt(said(text)).ids.tolist() == deployed
    assert '{"b": 2, "a": [1, {"z": 0' in tok.prompt(said(text)).text  # order and letters as given


def test_ids_and_raw_text_reach_the_engine_exactly_as_given():
    tok = tokenizer()

    async def workflow(task, model):
        first = await model.generate(np.array([5, 6, 7]))
        await model.generate(np.array([5, 6, 7, *first.tokens, 9]))
        await model.generate(np.array([5, 6, 8]))
        return 1.0

    first, second = rows_of([f"A{END}", f"B{END}", f"C{END}"], workflow=workflow)
    assert [len(first.turns), len(second.turns)] == [2, 1]
    assert first.tokens[:3].tolist() == [5, 6, 7]
    assert first.tokens[~first.action_mask].tolist() == [5, 6, 7, 9]
    assert sampled(second, tok) == f"C{END}"


def test_turns_are_kept_apart_when_they_are_not_to_be_merged():
    tok = tokenizer()
    first, second = rows_of([f"A{END}", f"B{END}"], merge_turns=False)
    assert [sampled(first, tok), sampled(second, tok)] == [f"A{END}", f"B{END}"]
    assert second.tokens[: len(first)].tolist() == first.tokens.tolist()
    assert not second.action_mask[: len(first)].any()


def test_a_sampled_token_is_trainable_in_exactly_one_experience_when_questions_run_side_by_side():
    tok = tokenizer()

    async def workflow(task, model):
        start = [{"role": "user", "content": "x"}]
        first = await model.generate(start)
        said = [*start, {"role": "assistant", "content": first.text}]
        more = [[*said, {"role": "user", "content": str(n)}] for n in range(3)]
        await asyncio.gather(*(model.generate(messages) for messages in more))
        return 1.0

    rows = rows_of([f"A{END}", f"B{END}", f"C{END}", f"D{END}"], workflow=workflow)
    assert [sampled(row, tok) for row in rows] == [f"A{END}B{END}", f"C{END}", f"D{END}"]
    assert all(tok.decode(row.tokens).count("assistant\nA") == 1 for row in rows)


def test_a_call_with_a_key_that_was_answered_is_not_sampled_again():
    from triune.explorer.session import Session, Shared
    from triune.ports import Sampling
    from triune.records import GroupId, RolloutId

    tok = tokenizer()
    engine = Talker(tok, lambda request, text: f"A{END}")
    shared = Shared(engine=engine, tokenizer=tok, sampling=Sampling(), seed=1, prefix="", max_context=100)
    session = Session(RolloutId(GroupId("r", "t", "k", 0), 0), shared)

    async def twice():
        said = [{"role": "user", "content": "x"}]
        return await session.chat(said, key="1"), await session.chat(said, key="1"), await session.chat(said, key="2")

    first, again, other = asyncio.run(twice())
    assert first is again
    assert other is not first
    assert len(engine.requests) == session.num_turns == 2


def test_a_different_temperature_in_one_call_is_recorded_per_token():
    async def workflow(task, model):
        chat = model.chat()
        await chat.ask("x", temperature=0.5)
        await chat.ask("y")
        return 1.0

    (row,) = rows_of([f"A{END}", f"B{END}"], workflow=workflow)
    first, second = row.turns
    assert set(row.temperature[first.start : first.stop]) == {np.float32(0.5)}
    assert set(row.temperature[second.start : second.stop]) == {np.float32(1.0)}


def test_case_07_temperature_zero_in_a_call_that_is_trained_on_fails_the_rollout():
    async def workflow(task, model):
        await model.chat(temperature=0.0).ask("x")
        return 1.0

    outcome = run_group(make_scheduler(workflow, retries=0), 1)
    assert outcome.group is None
    assert "temperature 0" in outcome.failures[0]["error"]


@pytest.mark.parametrize(
    ("options", "got"),
    [
        ({"stop": "Observation:"}, ("stop", ("Observation:",))),
        ({"stop": ["a", "b"]}, ("stop", ("a", "b"))),
        ({"temperature": np.float32(0.5)}, ("temperature", 0.5)),
        ({"max_tokens": np.int64(7)}, ("max_tokens", 7)),
        ({"stop": 5}, "stop"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 7.5}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
    ],
)
def test_options_of_a_call_have_the_types_of_the_engine_or_fail_the_rollout(options, got):
    async def workflow(task, model):
        await model.chat().ask("x", **options)
        return 1.0

    chosen = tokenizer()
    engine = Talker(chosen, lambda request, text: f"A{END}")
    outcome = run_group(make_scheduler(workflow, engine=engine, retries=0), 1)
    if isinstance(got, str):
        assert re.search(rf"sampling options \({got}\): Expected .*expected numbers", outcome.failures[0]["error"])
        assert engine.requests == []
    else:
        assert getattr(engine.requests[0].sampling, got[0]) == got[1]


def test_a_tokenizer_without_template_says_what_is_missing():
    tok = ChatTokenizer(chats.byte_tokenizer(None))
    with pytest.raises(ConfigError, match="no chat template"):
        tok.prompt([{"role": "user", "content": "x"}])
