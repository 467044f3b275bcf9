"""The fast path gives the Hugging Face forward's numbers, for every family it claims and for every way in."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from tiny_engines import at, generate_all, hf_logprobs, make_engine, prompts, run, tiny_model

from triune.explorer.engines._layout import why_generic
from triune.ports import GenerateRequest, Sampling
from triune.testing.lanes import ThreadLane

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES = [
    ("llama", {}),
    ("llama", {"tied": False}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"num_key_value_heads": 4}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    ("qwen2", {}),
    ("qwen3", {"tied": False}),
    ("mistral", {"sliding_window": None}),
]
GENERIC = [
    ("gpt2", {}),
    ("gemma3_text", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    ("mistral", {"sliding_window": 8}),
]


@pytest.mark.parametrize(("family", "options"), FAMILIES, ids=lambda value: str(value)[:40])
def test_fast_path_agrees_with_hugging_face_in_fp32(family, options):
    model = tiny_model(family, **options)

    async def check():
        engine = await make_engine(model)
        assert engine.is_fast
        asked = prompts(7)
        for prompt, done in zip(asked, await generate_all(engine, asked, max_tokens=20), strict=True):
            assert len(done.tokens) == 20
            expected = at(hf_logprobs(model, prompt, done.tokens), done.tokens)
            np.testing.assert_allclose(done.logprobs, expected, atol=1e-4)

    run(check())


@pytest.mark.parametrize(("family", "options"), GENERIC, ids=lambda value: str(value)[:40])
def test_generic_path_serves_other_architectures(family, options):
    model = tiny_model(family, **options)

    async def check():
        engine = await make_engine(model, slots=4)
        assert not engine.is_fast
        asked = prompts(7)
        for prompt, done in zip(asked, await generate_all(engine, asked), strict=True):
            expected = at(hf_logprobs(model, prompt, done.tokens), done.tokens)
            np.testing.assert_allclose(done.logprobs, expected, atol=1e-4)

    run(check())


def test_recurrent_models_are_recomputed():
    model = tiny_model(
        "mamba", hidden_size=16, state_size=4, num_hidden_layers=2, vocab_size=50, intermediate_size=32, vocab=50
    )

    async def check():
        engine = await make_engine(model, slots=4, max_context=64)
        asked = prompts(5, high=9, vocab=50)
        for prompt, done in zip(asked, await generate_all(engine, asked, max_tokens=4), strict=True):
            expected = at(hf_logprobs(model, prompt, done.tokens), done.tokens)
            np.testing.assert_allclose(done.logprobs, expected, atol=1e-4)

    run(check())


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_case_01_logprobs_are_of_the_temperature_that_sampled(temperature):
    model = tiny_model()

    async def check():
        engine = await make_engine(model)
        asked = prompts(4)
        gaps = []
        for prompt, done in zip(asked, await generate_all(engine, asked, temperature=temperature), strict=True):
            gaps.append(done.logprobs - at(hf_logprobs(model, prompt, done.tokens, temperature), done.tokens))
            scored = await engine.logprobs(np.concatenate([prompt, done.tokens]), temperature=temperature)
            np.testing.assert_allclose(scored[len(prompt) :], done.logprobs, atol=1e-4)
            assert np.isnan(scored[0])
        assert abs(np.exp(-np.concatenate(gaps)).mean() - 1.0) < 1e-4

    run(check())


def test_case_05_one_by_one_or_together_gives_the_same_logprobs():
    model = tiny_model()

    async def check():
        engine = await make_engine(model)
        asked = prompts(8)
        together = await generate_all(engine, asked)
        for number, prompt in enumerate(asked):
            how = Sampling(max_tokens=12, ignore_eos=True)
            alone = await engine.generate(GenerateRequest(id="alone", prompt=prompt, seed=1000 + number, sampling=how))
            np.testing.assert_array_equal(alone.tokens, together[number].tokens)
            np.testing.assert_allclose(alone.logprobs, together[number].logprobs, atol=1e-4)

    run(check())


@pytest.mark.parametrize("fast_path", ["auto", "never"])
def test_case_14_prompts_of_any_length_share_a_batch(fast_path):
    """Wherever padding goes, greedy tokens are those of each prompt alone through Hugging Face."""
    model = tiny_model(vocab=120)

    async def check():
        engine = await make_engine(model, fast_path=fast_path)
        asked = [prompt % 120 for prompt in (*prompts(3, low=1, high=2), *prompts(3, low=60, high=90), *prompts(3))]
        for prompt, done in zip(asked, await generate_all(engine, asked, temperature=0.0), strict=True):
            table = hf_logprobs(model, prompt, done.tokens)
            np.testing.assert_allclose(at(table, done.tokens), table.max(axis=1), atol=1e-4)

    run(check())


def test_requests_may_come_and_go_while_others_decode():
    """Rows are reused, moved and grown; nobody's cache is mixed up with another's."""
    model = tiny_model()

    async def check():
        with ThreadLane() as lane:
            engine = await make_engine(model, lane=lane, slots=5, steps_per_job=3)
            asked = prompts(25, high=70)
            lengths = np.random.default_rng(1).integers(1, 40, len(asked))

            async def one(number: int):
                await asyncio.sleep(0.002 * (number % 7))
                how = Sampling(max_tokens=int(lengths[number]), ignore_eos=True, temperature=1.3)
                request = GenerateRequest(id=f"r{number}", prompt=asked[number], seed=number, sampling=how)
                return await engine.generate(request)

            for number, done in enumerate(await asyncio.gather(*map(one, range(len(asked))))):
                assert len(done.tokens) == lengths[number]
                expected = at(hf_logprobs(model, asked[number], done.tokens, 1.3), done.tokens)
                np.testing.assert_allclose(done.logprobs, expected, atol=1e-4)
            await engine.close()

    run(check())


def test_bfloat16_is_close_to_hugging_face_in_bfloat16():
    model = tiny_model(initializer_range=0.1)

    async def check():
        engine = await make_engine(model, dtype="bfloat16")
        reference = tiny_model(initializer_range=0.1).to(torch.bfloat16).float()
        asked = prompts(4)
        for prompt, done in zip(asked, await generate_all(engine, asked), strict=True):
            expected = at(hf_logprobs(reference, prompt, done.tokens), done.tokens)
            np.testing.assert_allclose(done.logprobs, expected, atol=0.2)

    run(check())


def test_layers_that_slide_are_not_for_the_fast_path():
    assert why_generic(tiny_model("mistral", sliding_window=8).config) == "sliding attention"
    assert "model_type" in why_generic(tiny_model("gpt2").config)
    assert why_generic(tiny_model("qwen3").config) == ""
