"""One suite over every engine: what the explorer may rely on, whatever samples the tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from triune.errors import EngineError, StaleWeightsError
from triune.explorer.engines.embedded import Embedded, EmbeddedEngine
from triune.models import canonical_state, weight_digest
from triune.ports import Engine, GenerateRequest, Sampling, WeightUpdate
from triune.records import Stop
from triune.testing.engines import Lies, Reply, ScriptedEngine
from triune.testing.lanes import InlineLane, ThreadLane
from triune.testing.tiny_models import tiny_llama

PROMPT = np.array([5, 6, 7], dtype=np.int32)
STATE = canonical_state(tiny_llama())
UPDATE = WeightUpdate(version=3, step=1, digest=weight_digest(STATE), dtype="float32")


async def scripted() -> Engine:
    def script(request: GenerateRequest) -> Reply:
        room = min(request.sampling.max_tokens, 256 - len(request.prompt))
        return Reply(tokens=[9] * room, stop=Stop.LENGTH)

    return ScriptedEngine(script, max_context=256, latency_s=0.002)


async def embedded(lane: Any, **settings: Any) -> Engine:
    engine = EmbeddedEngine(tiny_llama().config, None, lane, Embedded(slots=4, steps_per_job=2, **settings))
    await engine.swap(WeightUpdate(version=0, step=0, digest=UPDATE.digest, dtype="float32"), STATE)
    return engine


ENGINES: dict[str, Callable[[], Awaitable[Engine]]] = {
    "scripted": scripted,
    "fast": lambda: embedded(ThreadLane()),
    "fast, lane inline": lambda: embedded(InlineLane()),
    "generic": lambda: embedded(ThreadLane(), fast_path="never"),
}


@pytest.fixture(params=ENGINES)
def check(request: pytest.FixtureRequest) -> Callable[[Callable[[Engine], Awaitable[None]]], None]:
    """Run a test's body against a fresh engine, and close it."""

    def over(body: Callable[[Engine], Awaitable[None]]) -> None:
        async def work() -> None:
            engine = await ENGINES[request.param]()
            await body(engine)
            await engine.close()

        asyncio.run(asyncio.wait_for(work(), 30))

    return over


def ask(key: str, num: int = 6, **how: Any) -> GenerateRequest:
    return GenerateRequest(id=key, prompt=PROMPT, seed=4, sampling=Sampling(max_tokens=num, ignore_eos=True, **how))


def test_every_array_has_one_entry_per_sampled_token(check):
    async def body(engine: Engine) -> None:
        done = await engine.generate(ask("r/0"))
        assert (done.tokens.dtype, done.logprobs.dtype, done.versions.dtype) == (np.int32, np.float32, np.int32)
        assert len(done.tokens) == len(done.logprobs) == len(done.versions) == 6
        assert (done.logprobs <= 0).all()
        assert done.stop is Stop.LENGTH
        assert done.raw_logprobs is None
        truncated = await engine.generate(ask("r/1", top_p=0.5))
        assert truncated.raw_logprobs is not None
        assert len(truncated.raw_logprobs) == len(truncated.tokens)

    check(body)


def test_the_same_request_gives_the_same_answer(check):
    async def body(engine: Engine) -> None:
        first, second = await engine.generate(ask("a")), await engine.generate(ask("b"))
        np.testing.assert_array_equal(first.tokens, second.tokens)
        np.testing.assert_allclose(first.logprobs, second.logprobs, atol=1e-5)

    check(body)


def test_a_swap_changes_the_version_that_is_stamped(check):
    async def body(engine: Engine) -> None:
        assert engine.version == 0
        assert set((await engine.generate(ask("a"))).versions) == {0}
        await engine.swap(UPDATE, STATE)
        assert engine.version == 3
        assert set((await engine.generate(ask("b"))).versions) == {3}

    check(body)


def test_case_47_abort_is_told_from_a_short_answer(check):
    async def body(engine: Engine) -> None:
        await engine.pause()
        tasks = [asyncio.create_task(engine.generate(ask(f"r{number}", 200))) for number in range(3)]
        await asyncio.sleep(0.005)
        await engine.abort(["r1", "unknown"])
        await engine.resume()
        stops = [(await task).stop for task in tasks]
        assert stops == [Stop.LENGTH, Stop.ABORTED, Stop.LENGTH]

    check(body)


def test_a_paused_engine_answers_after_resume(check):
    async def body(engine: Engine) -> None:
        await engine.pause()
        task = asyncio.create_task(engine.generate(ask("r")))
        await asyncio.sleep(0.01)
        assert not task.done()
        await engine.resume()
        assert len((await task).tokens) == 6

    check(body)


def test_cancelled_requests_leave_nothing_behind(check):
    async def body(engine: Engine) -> None:
        tasks = [asyncio.create_task(engine.generate(ask(f"r{number}", 200))) for number in range(9)]
        await asyncio.sleep(0.005)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len((await engine.generate(ask("r0"))).tokens) == 6
        assert engine.stats()["running"] == 0

    check(body)


def test_more_requests_than_slots_are_all_answered(check):
    async def body(engine: Engine) -> None:
        done = await asyncio.gather(*(engine.generate(ask(f"r{number}", 1 + number)) for number in range(11)))
        assert [len(one.tokens) for one in done] == list(range(1, 12))
        assert engine.stats()["tokens"] == sum(range(1, 12))
        assert engine.stats()["tokens"] == 0

    check(body)


def test_case_16_the_context_is_one_budget(check):
    async def body(engine: Engine) -> None:
        assert engine.max_context == 256
        long = np.full(250, 5, dtype=np.int32)
        done = await engine.generate(
            GenerateRequest(id="r", prompt=long, sampling=Sampling(max_tokens=50, ignore_eos=True))
        )
        assert len(done.tokens) == 6
        assert done.stop.is_truncated
        with pytest.raises(EngineError):
            await engine.generate(GenerateRequest(id="s", prompt=np.full(256, 5, dtype=np.int32)))

    check(body)


def test_scores_begin_with_nan(check):
    async def body(engine: Engine) -> None:
        scores = await engine.logprobs(PROMPT)
        assert scores.dtype == np.float32
        assert np.isnan(scores).tolist() == [True, False, False]

    check(body)


def test_closing_fails_what_runs(check):
    async def body(engine: Engine) -> None:
        await engine.pause()
        task = asyncio.create_task(engine.generate(ask("r", 200)))
        await asyncio.sleep(0.005)
        await engine.close()
        await engine.resume()
        with pytest.raises(EngineError):
            await task

    check(body)


def test_a_scripted_engine_lies_on_command():
    async def work() -> None:
        lies = Lies()
        engine = ScriptedEngine(["whatever"], tokenizer=None, lies=lies)
        engine.script = [Reply(tokens=[1, 2, 3], logprobs=[-0.1, -0.2, -0.3])]
        lies.reverses_logprobs = True
        np.testing.assert_allclose((await engine.generate(ask("a"))).logprobs, [-0.3, -0.2, -0.1])
        lies.reverses_logprobs, lies.aborts_after = False, 1
        done = await engine.generate(ask("b"))
        assert (len(done.tokens), done.stop) == (1, Stop.ABORTED)
        lies.aborts_after, lies.keeps_old_weights = None, True
        await engine.swap(UPDATE, {})
        assert (engine.version, engine.served_version) == (3, 0)
        lies.refuses_swaps = True
        with pytest.raises(StaleWeightsError):
            await engine.swap(UPDATE, {})
        lies.crashes_after = 1
        await engine.generate(ask("c"))
        with pytest.raises(EngineError, match="crashed"):
            await engine.generate(ask("d"))

    asyncio.run(work())
