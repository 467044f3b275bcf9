"""Tokens come from the distribution that the log-prob speaks of, whatever truncates it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from tiny_engines import at, generate_all, hf_logprobs, make_engine, prompts, run, tiny_model
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from triune.explorer.engines._sampler import Choice, choose
from triune.explorer.engines._uniforms import uniforms
from triune.ports import GenerateRequest, Sampling

TRUNCATIONS = [
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.02, "temperature": 0.6},
    {"top_p": 0.9, "temperature": 1.4},
    {"top_k": 1},
    {"top_p": 0.01},
]


def choice(num: int, uniform: np.ndarray, **how: float) -> Choice:
    filled = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, **how}
    kinds = {"top_k": np.int64}
    columns = {name: np.full(num, value, dtype=kinds.get(name, np.float64)) for name, value in filled.items()}
    return Choice(uniform=uniform, **columns)


def warped(logits: torch.Tensor, how: dict[str, float]) -> np.ndarray:
    """log-probs as Transformers' own processors would make them."""
    chain = LogitsProcessorList([TemperatureLogitsWarper(float(how.get("temperature", 1.0)))])
    if how.get("top_k"):
        chain.append(TopKLogitsWarper(int(how["top_k"])))
    if how.get("top_p", 1.0) < 1:
        chain.append(TopPLogitsWarper(how["top_p"]))
    if how.get("min_p"):
        chain.append(MinPLogitsWarper(how["min_p"]))
    return chain(torch.zeros(len(logits), 1, dtype=torch.long), logits.clone()).log_softmax(-1).numpy()


@pytest.mark.parametrize("how", TRUNCATIONS, ids=str)
def test_case_02_truncated_logprobs_are_of_the_surviving_set_and_raw_ones_stand_beside(how):
    model = tiny_model()

    async def check():
        engine = await make_engine(model)
        asked = prompts(6)
        for prompt, done in zip(asked, await generate_all(engine, asked, **how), strict=True):
            temperature = how.get("temperature", 1.0)
            table = hf_logprobs(model, prompt, done.tokens, temperature)
            np.testing.assert_allclose(done.raw_logprobs, at(table, done.tokens), atol=1e-4)
            expected = warped(torch.from_numpy(table * temperature), how)
            np.testing.assert_allclose(done.logprobs, at(expected, done.tokens), atol=2e-4)
            kept_mass = np.exp(done.raw_logprobs - done.logprobs)
            assert ((kept_mass > 0) & (kept_mass <= 1 + 1e-6)).all()

    run(check())


def test_rows_that_truncate_and_rows_that_do_not_share_a_step():
    model = tiny_model()

    async def check():
        engine = await make_engine(model)
        ways = [{}, {"top_k": 3}, {"temperature": 0.0}, {"top_p": 0.5, "temperature": 0.7}]
        asked = prompts(4)
        requests = [
            GenerateRequest(id=f"r{i}", prompt=p, seed=i, sampling=Sampling(max_tokens=9, ignore_eos=True, **way))
            for i, (p, way) in enumerate(zip(asked, ways, strict=True))
        ]
        for prompt, way, done in zip(asked, ways, await asyncio.gather(*map(engine.generate, requests)), strict=True):
            temperature = way.get("temperature", 1.0) or 1.0
            table = hf_logprobs(model, prompt, done.tokens, temperature)
            if way.get("temperature") == 0.0:
                np.testing.assert_array_equal(done.tokens, table.argmax(axis=1))
            expected = warped(torch.from_numpy(table * temperature), {**way, "temperature": temperature})
            np.testing.assert_allclose(done.logprobs, at(expected, done.tokens), atol=2e-4)
            assert (done.raw_logprobs is not None) == bool(way.keys() & {"top_k", "top_p"})

    run(check())


@pytest.mark.parametrize("vocab", [7, 300, 5000])
def test_frequencies_match_the_distribution(vocab):
    """Chi-square over 40,000 draws, with one and with two levels of the cumulative sum."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(vocab, generator=generator) * 2
    num, rows = 40_000, 500
    counts = np.zeros(vocab)
    for first in range(0, num, rows):
        uniform = uniforms(np.full(rows, 5, dtype=np.uint64), np.arange(first, first + rows))
        tokens = choose(logits.expand(rows, vocab), choice(rows, uniform)).tokens
        counts += np.bincount(tokens, minlength=vocab)
    expected = logits.double().softmax(-1).numpy() * num
    order = np.argsort(expected)
    bins = np.searchsorted(np.cumsum(expected[order]), np.linspace(0, num, 21)[1:-1])
    seen, meant = (np.array([part.sum() for part in np.split(values[order], bins)]) for values in (counts, expected))
    keep = meant > 5
    chi_square = ((seen - meant)[keep] ** 2 / meant[keep]).sum()
    assert chi_square < keep.sum() + 5 * np.sqrt(2 * keep.sum())


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-53])
@pytest.mark.parametrize("vocab", [300, 5000])
def test_the_ends_of_the_distribution_never_give_an_impossible_token(uniform, vocab):
    logits = torch.full((1, vocab), -torch.inf)
    logits[0, 17], logits[0, vocab - 9] = 1.0, 2.0
    chosen = choose(logits, choice(1, np.array([uniform])))
    assert chosen.tokens[0] == (17 if uniform == 0.0 else vocab - 9)
    np.testing.assert_allclose(chosen.logprobs, np.log(1 / (1 + np.exp(1.0 if uniform == 0.0 else -1.0))), rtol=1e-5)


def test_case_09_seeds_decide_and_the_batch_does_not():
    model = tiny_model()

    async def check():
        engine = await make_engine(model)
        prompt = prompts(1)[0]
        how = Sampling(max_tokens=16, ignore_eos=True, temperature=1.5)

        async def ask(seed: int, key: str):
            return (
                await engine.generate(GenerateRequest(id=key, prompt=prompt, seed=seed, sampling=how))
            ).tokens.tolist()

        alone = await ask(7, "alone")
        crowd = await asyncio.gather(*(ask(seed, f"c{seed}") for seed in range(12)))
        assert crowd[7] == alone
        assert len({tuple(tokens) for tokens in crowd}) == 12
        assert await ask(2**64 - 1, "largest") != alone

    run(check())


def test_uniforms_are_uniform_and_neighbouring_seeds_do_not_share_numbers():
    seeds, positions = (part.ravel() for part in np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(200)))
    numbers = uniforms(seeds, positions)
    assert len(np.unique(numbers)) == len(numbers)
    assert abs(numbers.mean() - 0.5) < 0.005
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert ((counts - 3000) ** 2 / 3000).sum() < 45


def test_logits_that_are_not_finite_fail_the_requests_and_not_the_engine():
    model = tiny_model()

    async def check():
        from triune.errors import EngineError

        engine = await make_engine(model)
        step = engine._batcher.decoder.step
        engine._batcher.decoder.step = lambda *args: step(*args) * float("nan")
        with pytest.raises(EngineError, match="not finite"):
            await generate_all(engine, prompts(1))
        engine._batcher.decoder.step = step
        assert len((await generate_all(engine, prompts(1)))[0].tokens) == 12

    run(check())
