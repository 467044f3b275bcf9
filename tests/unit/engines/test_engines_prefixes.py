"""A prompt is run once per group, a conversation once per token, and nobody can tell from the answers."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from tiny_engines import at, hf_logprobs, make_engine, prompts, run, tiny_model

from triune.ports import GenerateRequest, Sampling

HOW = Sampling(max_tokens=10, ignore_eos=True)


def group(prompt, name: str, size: int, prefix: str) -> list[GenerateRequest]:
    return [
        GenerateRequest(id=f"{name}-{member}/0", prompt=prompt, seed=member, sampling=HOW, prefix=prefix)
        for member in range(size)
    ]


@pytest.mark.parametrize("fast_path", ["auto", "never"])
def test_a_group_runs_its_prompt_once_and_gets_the_same_answers(fast_path):
    model = tiny_model()

    async def check():
        asked = prompts(3)
        answers = []
        for prefix in ("", "g"):
            engine = await make_engine(model, slots=32, fast_path=fast_path)
            requests = [one for i, p in enumerate(asked) for one in group(p, f"{i}", 5, prefix and f"{prefix}{i}")]
            answers.append(await asyncio.gather(*map(engine.generate, requests)))
            stats = engine.stats()
            assert stats["prefill_tokens"] == sum(map(len, asked)) * (1 if prefix else 5)
            assert stats["prompt_tokens"] == sum(map(len, asked)) * 5
        for one, other in zip(*answers, strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)

    run(check())


def test_members_that_come_later_copy_the_prompt_of_those_before():
    model = tiny_model()

    async def check():
        engine = await make_engine(model, slots=3)  # so that a group of 8 is admitted in parts
        prompt = prompts(1, low=20)[0]
        answers = await asyncio.gather(*map(engine.generate, group(prompt, "a", 8, "g")))
        assert engine.stats()["prefill_tokens"] == len(prompt)
        late = await engine.generate(group(prompt, "late", 1, "g")[0])
        assert engine.stats().get("prefill_tokens", 0) == 0
        np.testing.assert_array_equal(late.tokens, answers[0].tokens)
        for done in answers:
            np.testing.assert_allclose(
                done.logprobs, at(hf_logprobs(model, prompt, done.tokens), done.tokens), atol=1e-4
            )

    run(check())


def test_other_prompts_under_the_same_prefix_name_are_not_confused():
    model = tiny_model()

    async def check():
        engine = await make_engine(model)
        first, second = prompts(2)
        for prompt in (first, second, first[:-1]):
            done = await engine.generate(group(prompt, "x", 1, "same name")[0])
            np.testing.assert_allclose(
                done.logprobs, at(hf_logprobs(model, prompt, done.tokens), done.tokens), atol=1e-4
            )

    run(check())


def test_a_next_turn_goes_on_from_the_cache_of_the_last():
    model = tiny_model()

    async def check():
        engine = await make_engine(model)
        starts = prompts(6)
        talks = list(starts)
        for turn in range(3):
            engine.stats()
            requests = [
                GenerateRequest(id=f"{i}/{turn}", prompt=talk, seed=i, sampling=HOW) for i, talk in enumerate(talks)
            ]
            answers = await asyncio.gather(*map(engine.generate, requests))
            stats = engine.stats()
            if turn:
                assert stats.get("prefill_tokens", 0) == 0
                assert stats["reused_tokens"] == sum(map(len, talks)) - 6 * 4  # the last sampled and 3 new ones
            for i, done in enumerate(answers):
                expected = at(hf_logprobs(model, talks[i], done.tokens), done.tokens)
                np.testing.assert_allclose(done.logprobs, expected, atol=1e-4)
                talks[i] = np.concatenate([talks[i], done.tokens, np.array([7, 8, 9 + turn], dtype=np.int32)])

    run(check())


@pytest.mark.parametrize("place", [5, 22, -4])
def test_a_next_turn_that_rewrites_the_past_starts_anew(place):
    model = tiny_model()

    async def check():
        engine = await make_engine(model)
        prompt = prompts(1, low=20, high=21)[0]
        first = await engine.generate(GenerateRequest(id="r/0", prompt=prompt, sampling=HOW))
        rewritten = np.concatenate([prompt, first.tokens, np.array([7, 8], dtype=np.int32)])
        rewritten[place] = (rewritten[place] + 1) % 300
        engine.stats()
        second = await engine.generate(GenerateRequest(id="r/1", prompt=rewritten, sampling=HOW))
        assert engine.stats()["prefill_tokens"] == len(rewritten)
        expected = at(hf_logprobs(model, rewritten, second.tokens), second.tokens)
        np.testing.assert_allclose(second.logprobs, expected, atol=1e-4)

    run(check())


def test_the_same_batch_gives_the_same_answers_twice():
    model = tiny_model()

    async def check():
        asked = prompts(4)
        answers = []
        for _ in range(2):
            engine = await make_engine(model, slots=7)
            requests = [one for i, p in enumerate(asked) for one in group(p, f"{i}", 4, f"g{i}")]
            answers.append(await asyncio.gather(*map(engine.generate, requests)))
        for one, other in zip(*answers, strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
            np.testing.assert_array_equal(one.logprobs, other.logprobs)

    run(check())
