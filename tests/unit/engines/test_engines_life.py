"""Stops, aborts, pauses, swaps: what a request gets when something ends it or changes under it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from tiny_engines import at, generate_all, hf_logprobs, make_engine, prompts, run, tiny_model, update_of

from triune.errors import EngineError, StaleWeightsError
from triune.explorer.engines._fast import FastDecoder
from triune.explorer.engines.embedded import EmbeddedEngine
from triune.models import canonical_state
from triune.ports import GenerateRequest, Sampling
from triune.records import Stop
from triune.testing.chats import byte_tokenizer
from triune.testing.lanes import InlineLane, ThreadLane

FOREVER = Sampling(max_tokens=200, ignore_eos=True)


def request(key: str, prompt, seed: int = 0, sampling: Sampling = FOREVER, prefix: str = "") -> GenerateRequest:
    return GenerateRequest(id=key, prompt=prompt, seed=seed, sampling=sampling, prefix=prefix)


async def running(engine: EmbeddedEngine, tokens: int = 3) -> None:
    """Wait until every row has so many tokens."""
    rows = engine._batcher.rows
    while not (rows.is_live.any() and rows.count[rows.is_live].min() >= tokens):
        await asyncio.sleep(0.001)


def test_end_tokens_end_an_answer_and_are_part_of_it():
    model = tiny_model(eos_token_id=[1, 5], vocab=12)

    async def check():
        engine = await make_engine(model)
        done = await generate_all(engine, [prompt % 10 for prompt in prompts(12)], max_tokens=60, ignore_eos=False)
        ended = [one for one in done if one.stop is Stop.DONE]
        assert ended
        for one in done:
            inside = np.isin(one.tokens, [1, 5])
            assert not inside[:-1].any()
            assert (one.stop is Stop.DONE) == bool(inside[-1])
            assert one.stop is Stop.DONE or (one.stop is Stop.LENGTH and len(one.tokens) == 60)

    run(check())


def test_case_12_the_sampled_stop_token_is_kept_with_its_logprob():
    model = tiny_model()

    async def check():
        engine = await make_engine(model)
        prompt = prompts(1)[0]
        free = (await generate_all(engine, [prompt]))[0]
        stopped = (await generate_all(engine, [prompt], stop_ids=(int(free.tokens[4]),)))[0]
        first = free.tokens.tolist().index(free.tokens[4]) + 1
        np.testing.assert_array_equal(stopped.tokens, free.tokens[:first])
        np.testing.assert_array_equal(stopped.logprobs, free.logprobs[:first])
        assert stopped.stop is Stop.DONE

    run(check())


def test_stop_strings_end_where_their_last_byte_was_sampled():
    model = tiny_model(vocab=259)

    async def check():
        tokenizer = byte_tokenizer()
        engine = await make_engine(model, tokenizer)
        prompt = prompts(1, vocab=259)[0]
        free = (await generate_all(engine, [prompt], max_tokens=40))[0]
        text = tokenizer.decode(free.tokens[10:13].tolist())
        if "\ufffd" in text:
            text = tokenizer.decode(free.tokens[:40].tolist()).replace("\ufffd", " ").split()[0]
        stopped = (await generate_all(engine, [prompt], max_tokens=40, stop=("never said", text)))[0]
        assert stopped.stop is Stop.DONE
        assert text in tokenizer.decode(stopped.tokens.tolist())
        assert text not in tokenizer.decode(stopped.tokens[:-1].tolist())
        np.testing.assert_array_equal(stopped.tokens, free.tokens[: len(stopped.tokens)])

    run(check())


def test_case_60_every_way_of_being_cut_says_so():
    """max_tokens, positions and abort are three stops, on the fast and on the generic path."""
    model = tiny_model(max_position_embeddings=40)

    async def check(fast_path: str):
        engine = await make_engine(model, fast_path=fast_path)
        prompt = prompts(1, low=30, high=31)[0]
        by_length = await engine.generate(request("a", prompt, sampling=Sampling(max_tokens=10, ignore_eos=True)))
        by_context = await engine.generate(request("b", prompt, sampling=Sampling(max_tokens=11, ignore_eos=True)))
        assert (by_length.stop, len(by_length.tokens)) == (Stop.LENGTH, 10)
        assert (by_context.stop, len(by_context.tokens)) == (Stop.CONTEXT, 10)
        for completion in (by_length, by_context):
            assert completion.stop.is_truncated

    run(check("auto"))
    run(check("never"))


def test_case_47_an_aborted_answer_says_so_and_keeps_what_it_has():
    model = tiny_model()

    async def check():
        with ThreadLane(delay_s=0.002) as lane:
            engine = await make_engine(model, lane=lane, slots=2, steps_per_job=2)
            asked = prompts(4, high=8)
            tasks = [asyncio.create_task(engine.generate(request(f"r{i}", p, i))) for i, p in enumerate(asked)]
            await running(engine)
            await engine.abort(["r0", "r3"])
            done = await tasks[0]
            assert done.stop is Stop.ABORTED
            assert 3 <= len(done.tokens) < 200
            np.testing.assert_allclose(
                done.logprobs, at(hf_logprobs(model, asked[0], done.tokens), done.tokens), atol=1e-4
            )
            waiting = await tasks[3]
            assert (waiting.stop, len(waiting.tokens)) == (Stop.ABORTED, 0)
            assert not tasks[1].done()
            await engine.abort()
            assert [(await task).stop for task in tasks[1:3]] == [Stop.ABORTED] * 2
            assert engine.stats()["running"] == 0
            await engine.close()

    run(check())


def test_cancelling_the_caller_frees_the_slot():
    model = tiny_model()

    async def check():
        with ThreadLane(delay_s=0.002) as lane:
            engine = await make_engine(model, lane=lane, slots=1, steps_per_job=2)
            first = asyncio.create_task(engine.generate(request("a", prompts(1)[0])))
            await running(engine)
            first.cancel()
            short = Sampling(max_tokens=2, ignore_eos=True)
            done = await asyncio.wait_for(engine.generate(request("b", prompts(1)[0], sampling=short)), 5)
            assert len(done.tokens) == 2
            assert first.cancelled()
            assert engine.stats()["cancelled"] == 1
            await engine.close()

    run(check())


def test_a_pause_holds_requests_and_a_resume_lets_them_go_on():
    model = tiny_model()

    async def check():
        with ThreadLane() as lane:
            engine = await make_engine(model, lane=lane, steps_per_job=2)
            expected = await generate_all(engine, prompts(3), max_tokens=100)
            task = asyncio.create_task(generate_all(engine, prompts(3), max_tokens=100))
            await running(engine)
            await engine.pause()
            count = engine._batcher.rows.count.sum()
            await asyncio.sleep(0.03)
            assert engine._batcher.rows.count.sum() == count
            await engine.resume()
            for one, other in zip(await task, expected, strict=True):
                np.testing.assert_array_equal(one.tokens, other.tokens)
            await engine.close()

    run(check())


@pytest.mark.parametrize("fast_path", ["auto", "never"])
def test_a_swap_under_running_requests_stamps_every_token_with_its_weights(fast_path):
    old, new = tiny_model(seed=0), tiny_model(seed=1)

    async def check():
        with ThreadLane() as lane:
            engine = await make_engine(old, lane=lane, steps_per_job=2, fast_path=fast_path)
            asked = prompts(5)
            how = Sampling(max_tokens=60, ignore_eos=True)
            tasks = [asyncio.create_task(engine.generate(request(f"r{i}", p, i, how))) for i, p in enumerate(asked)]
            await running(engine)
            await engine.pause()
            state = canonical_state(new)
            await engine.swap(update_of(state, version=4), state)
            assert engine.version == 4
            await engine.resume()
            for prompt, task in zip(asked, tasks, strict=True):
                done = await task
                cut = int((done.versions == 0).sum())
                assert 3 <= cut < 60
                assert (done.versions == [0] * cut + [4] * (60 - cut)).all()
                before, after = (at(hf_logprobs(m, prompt, done.tokens), done.tokens) for m in (old, new))
                np.testing.assert_allclose(done.logprobs[:cut], before[:cut], atol=1e-4)
                np.testing.assert_allclose(done.logprobs[cut:], after[cut:], atol=1e-4)
            assert engine.stats()["recomputed_tokens"] > 0
            await engine.close()

    run(check())


def test_keeping_the_cache_over_a_swap_is_declared_and_counted():
    old, new = tiny_model(seed=0), tiny_model(seed=1)

    async def check():
        with ThreadLane() as lane:
            engine = await make_engine(old, lane=lane, steps_per_job=2, keep_kv=True)
            task = asyncio.create_task(engine.generate(request("r", prompts(1)[0])))
            await running(engine)
            assert engine.stats()["mixed_kv_ratio"] == 0.0
            state = canonical_state(new)
            await engine.swap(update_of(state, version=1), state)
            await running(engine, tokens=20)
            await engine.abort()
            done = await task
            stats = engine.stats()
            assert stats["mixed_kv_ratio"] > 0
            assert "recomputed_tokens" not in stats
            assert set(done.versions) == {0, 1}
            await engine.close()

    run(check())


def test_case_06_weights_that_are_not_the_published_ones_are_refused():
    model = tiny_model()

    async def check():
        engine = await make_engine(model)
        state = {name: tensor.clone() for name, tensor in canonical_state(tiny_model(seed=1)).items()}
        update = update_of(state, version=1)
        state["model.layers.1.mlp.up_proj.weight"].view(-1)[7] += 1e-3
        before = await generate_all(engine, prompts(2))
        with pytest.raises(StaleWeightsError, match="digest"):
            await engine.swap(update, state)
        assert engine.version == 0
        for one, other in zip(before, await generate_all(engine, prompts(2)), strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
            assert (other.versions == 0).all()

    run(check())


@pytest.mark.parametrize("fast_path", ["auto", "never"])
def test_case_06_an_engine_that_goes_on_with_old_weights_is_caught_by_the_probe(fast_path):
    model = tiny_model()

    async def check():
        engine = await make_engine(model, fast_path=fast_path)
        decoder = engine._batcher.decoder
        old = decoder.stage(canonical_state(model))
        decoder.stage = lambda tensors: old
        state = canonical_state(tiny_model(seed=1))
        with pytest.raises(StaleWeightsError, match="probe"):
            await engine.swap(update_of(state, version=1), state)
        assert engine.version == 0

    run(check())


def test_case_06_no_prefix_outlives_the_weights_that_filled_it():
    old, new = tiny_model(seed=0), tiny_model(seed=1)

    async def check():
        engine = await make_engine(old)
        prompt = prompts(1)[0]
        await engine.generate(request("a/0", prompt, sampling=Sampling(max_tokens=4), prefix="g"))
        state = canonical_state(new)
        await engine.swap(update_of(state, version=1), state)
        engine.stats()
        how = Sampling(max_tokens=8, ignore_eos=True)
        done = await engine.generate(request("b/0", prompt, sampling=how, prefix="g"))
        np.testing.assert_allclose(done.logprobs, at(hf_logprobs(new, prompt, done.tokens), done.tokens), atol=1e-4)
        assert engine.stats()["reused_tokens"] == 0

    run(check())


def test_the_engine_owns_its_weights():
    """What the trainer changes in place afterwards does not change what is served."""
    model = tiny_model()

    async def check():
        engine = await make_engine(model)
        before = await generate_all(engine, prompts(3))
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.5)
        for one, other in zip(before, await generate_all(engine, prompts(3)), strict=True):
            np.testing.assert_array_equal(one.logprobs, other.logprobs)

    run(check())


def test_weights_with_a_missing_tensor_are_refused_by_name():
    model = tiny_model()

    async def check(fast_path: str):
        engine = await make_engine(model, fast_path=fast_path)
        state = canonical_state(model)
        del state["model.norm.weight"]
        with pytest.raises(EngineError, match=r"model\.norm\.weight"):
            await engine.swap(update_of(state, version=1), state)
        assert engine.version == 0

    run(check("auto"))
    run(check("never"))


def test_a_closed_engine_fails_what_was_running():
    model = tiny_model()

    async def check():
        with ThreadLane(delay_s=0.002) as lane:
            engine = await make_engine(model, lane=lane, steps_per_job=2)
            task = asyncio.create_task(engine.generate(request("a", prompts(1)[0])))
            await running(engine)
            await engine.close()
            with pytest.raises(EngineError, match="closed"):
                await task
            with pytest.raises(EngineError, match="closed"):
                await engine.generate(request("b", prompts(1)[0]))

    run(check())


def test_what_can_never_be_decoded_is_refused_at_once():
    model = tiny_model(max_position_embeddings=40)
    one = np.array([3], dtype=np.int32)
    cases = [
        (request("r", one[:0]), "at least one token"),
        (request("r", np.array([300])), "0 … 299"),
        (request("r", np.array([-1])), "0 … 299"),
        (request("r", np.full(40, 3)), "max_context"),
        (request("r", one, sampling=Sampling(max_tokens=0)), "at least one token"),
        (request("r", one, sampling=Sampling(temperature=-1.0)), "temperature"),
        (request("r", one, sampling=Sampling(temperature=float("nan"))), "temperature"),
        (request("r", one, sampling=Sampling(top_p=0.0)), "top_p"),
        (request("r", one, sampling=Sampling(stop=("x",))), "tokenizer"),
    ]

    async def check():
        engine = await make_engine(model)
        for bad, message in cases:
            with pytest.raises(EngineError, match=message):
                await engine.generate(bad)
        last = await engine.generate(request("r", np.full(39, 3)))
        assert (len(last.tokens), last.stop) == (1, Stop.CONTEXT)
        with pytest.raises(EngineError, match="kv_bytes"):
            await (await make_engine(model, kv_bytes=1 << 12)).generate(request("r", one))

    run(check())


def test_without_weights_nothing_is_sampled_or_scored():
    async def check():
        engine = EmbeddedEngine(tiny_model().config, None, InlineLane())
        assert engine.version == -1
        with pytest.raises(EngineError, match="no weights"):
            await engine.generate(request("r", prompts(1)[0]))
        with pytest.raises(EngineError, match="weights"):
            await engine.logprobs(prompts(1)[0])

    run(check())


def test_the_cache_stays_within_its_bytes_and_everybody_is_served():
    model = tiny_model()

    async def check():
        engine = await make_engine(model, kv_bytes=5 * 64 * 2 * 32 * 4, slots=16)
        decoder, most = engine._batcher.decoder, 0
        resize = decoder.resize

        def watch(rows: int, positions: int) -> None:
            nonlocal most
            most = max(most, rows * positions * decoder.bytes_per_position)
            resize(rows, positions)

        decoder.resize = watch
        asked = [*prompts(9, high=20), *prompts(3, low=70, high=100), *prompts(9, high=20)]
        for prompt, done in zip(asked, await generate_all(engine, asked), strict=True):
            np.testing.assert_allclose(
                done.logprobs, at(hf_logprobs(model, prompt, done.tokens), done.tokens), atol=1e-4
            )
        assert 0 < most <= engine.settings.kv_bytes

    run(check())


def test_a_full_engine_takes_prompts_together_and_the_last_one_alone(monkeypatch):
    taken: list[int] = []
    prefill = FastDecoder.prefill

    def counted(self, asked, rows):
        taken.append(len(asked))
        return prefill(self, asked, rows)

    monkeypatch.setattr(FastDecoder, "prefill", counted)

    async def work():
        engine = await make_engine(tiny_model(), slots=16)
        asked = [
            engine.generate(request(str(n), prompt, n, Sampling(max_tokens=3 + n % 7, ignore_eos=True)))
            for n, prompt in enumerate(prompts(65))
        ]
        done = await asyncio.gather(*asked)
        await engine.close()
        return done

    assert [len(one.tokens) for one in run(work())] == [3 + n % 7 for n in range(65)]
    assert sum(taken) == 65
    assert min(taken[:-1]) >= 2, "one in eight slots is free before a full engine reads on"
