"""An engine without a model: answers by script, and lies, stalls or crashes on command."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from triune.errors import EngineError, StaleWeightsError
from triune.explorer.engines._uniforms import uniforms
from triune.ports import Completion, GenerateRequest, WeightUpdate
from triune.records import Stop
from triune.shapes import LogprobsT, TokensT


class Sleeper(Protocol):
    """A clock: `FakeClock`, or anything with `sleep`."""

    async def sleep(self, seconds: float) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One scripted answer.

    Attributes:
        text: Encoded by the engine's tokenizer; its end token follows unless the stop is another than done.
        tokens: Ids instead of a text, exactly as they are returned.
        logprobs: Of these tokens; None = made up from the request's seed, always below 0.
        stop: Why it ended.
        latency_s: Time it takes; None = the engine's.
    """

    text: str = ""
    tokens: Sequence[int] | None = None
    logprobs: Sequence[float] | None = None
    stop: Stop = Stop.DONE
    latency_s: float | None = None


Script = Callable[[GenerateRequest], Reply | str | Sequence[int]]


@dataclass(kw_only=True)
class Lies:
    """What the engine does wrong; a test sets these at any time.

    Attributes:
        keeps_old_weights: A swap is confirmed but the old weights go on answering (`served_version` tells).
        refuses_swaps: A swap raises StaleWeightsError, as an honest engine does when digest or probe differ.
        reverses_logprobs: Log-probs in the wrong order.
        aborts_after: Every completion is aborted after so many tokens.
        crashes_after: The engine raises EngineError from this call on (0 = the next one); None = never.
        hangs: Completions never come; cancelling still works.
    """

    keeps_old_weights: bool = False
    refuses_swaps: bool = False
    reverses_logprobs: bool = False
    aborts_after: int | None = None
    crashes_after: int | None = None
    hangs: bool = False


@dataclass(eq=False)
class ScriptedEngine:
    """Port `Engine` whose answers are written by the test.

    Args:
        script: Request → `Reply`, text or ids. A list of them is answered in turn, the last one for ever.
        tokenizer: For texts, with `encode`, `decode` and `eos_token_id`.
        latency_s: Seconds a completion takes, a number or by request.
        clock: Where they pass; None = real time.
        max_context: Positions; longer prompts raise as the embedded engine's do.
        version: Confirmed version at the start; 0 so that no swap is needed first.
    """

    script: Script | Sequence[Reply | str]
    tokenizer: Any = None
    latency_s: float | Callable[[GenerateRequest], float] = 0.0
    clock: Sleeper | None = None
    max_context: int = 4096
    version: int = 0
    lies: Lies = field(default_factory=Lies)

    def __post_init__(self) -> None:
        self.served_version = self.version
        self.requests: list[GenerateRequest] = []
        self.swaps: list[WeightUpdate] = []
        self.peak_running = 0
        self._running: dict[str, asyncio.Future[bool]] = {}
        self._open = asyncio.Event()
        self._open.set()
        self._is_closed = False
        self._counters = {"tokens": 0.0, "requests": 0.0}

    async def generate(self, request: GenerateRequest) -> Completion:
        """Answer by script after the latency; raises EngineError as the embedded engine does, or on command."""
        self._check(request)
        number = len(self.requests)
        self.requests.append(request)
        reply = self._reply(request, number)
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._running[request.id] = future
        self.peak_running = max(self.peak_running, len(self._running))
        dispatched = self.version
        try:
            await self._open.wait()
            is_whole = await self._wait(reply, request, future)
        finally:
            del self._running[request.id]
        return self._completion(request, reply, dispatched, is_whole)

    def _check(self, request: GenerateRequest) -> None:
        where = f"request {request.id}"
        if self._is_closed:
            raise EngineError(where, "the engine is closed")
        if self.lies.crashes_after is not None:
            if self.lies.crashes_after <= 0:
                raise EngineError(where, "the scripted engine crashed")
            self.lies.crashes_after -= 1
        if not 0 < len(request.prompt) < self.max_context:
            raise EngineError(where, f"a prompt of {len(request.prompt)} tokens", f"1 … {self.max_context - 1}")

    def _reply(self, request: GenerateRequest, number: int) -> Reply:
        script = self.script
        found = script(request) if callable(script) else script[min(number, len(script) - 1)]
        if isinstance(found, Reply):
            return found
        return Reply(text=found) if isinstance(found, str) else Reply(tokens=found)

    async def _wait(self, reply: Reply, request: GenerateRequest, ended: asyncio.Future[bool]) -> bool:
        """Let the latency pass; False when the request was aborted meanwhile."""
        latency = self.latency_s(request) if callable(self.latency_s) else self.latency_s
        seconds = latency if reply.latency_s is None else reply.latency_s
        if self.lies.hangs:
            return await ended
        if seconds <= 0:
            await asyncio.sleep(0)
            return not ended.done() or ended.result()
        sleep = asyncio.ensure_future(self.clock.sleep(seconds) if self.clock else asyncio.sleep(seconds))
        try:
            await asyncio.wait([sleep, ended], return_when=asyncio.FIRST_COMPLETED)
            return not ended.done() or ended.result()
        finally:
            sleep.cancel()

    def _completion(self, request: GenerateRequest, reply: Reply, version: int, is_whole: bool) -> Completion:
        tokens, stop = self._tokens(request, reply)
        logprobs = self._logprobs(request, reply, len(tokens))
        keep = len(tokens) if is_whole else len(tokens) // 2
        if self.lies.aborts_after is not None and self.lies.aborts_after < keep:
            keep, is_whole = self.lies.aborts_after, False
        if self.lies.reverses_logprobs:
            logprobs = logprobs[::-1].copy()
        self._counters["tokens"] += keep
        self._counters["requests"] += 1
        return Completion(
            tokens=tokens[:keep],
            logprobs=logprobs[:keep],
            versions=np.full(keep, version, dtype=np.int32),
            raw_logprobs=logprobs[:keep].copy() if request.sampling.is_truncated else None,
            stop=stop if is_whole else Stop.ABORTED,
        )

    def _tokens(self, request: GenerateRequest, reply: Reply) -> tuple[np.ndarray, Stop]:
        if reply.tokens is not None:
            ids = list(reply.tokens)
        else:
            assert self.tokenizer is not None, "a text needs a tokenizer"
            ids = list(self.tokenizer.encode(reply.text, add_special_tokens=False))
            if reply.stop is Stop.DONE and not request.sampling.ignore_eos:
                ids.append(self.tokenizer.eos_token_id)
        room = self.max_context - len(request.prompt)
        limit = min(request.sampling.max_tokens, room)
        if len(ids) <= limit:
            return np.array(ids, dtype=np.int32), reply.stop
        stop = Stop.LENGTH if request.sampling.max_tokens <= room else Stop.CONTEXT
        return np.array(ids[:limit], dtype=np.int32), stop

    @staticmethod
    def _logprobs(request: GenerateRequest, reply: Reply, num: int) -> np.ndarray:
        if reply.logprobs is not None:
            return np.array(reply.logprobs[:num], dtype=np.float32)
        seeds = np.full(num, request.seed & 0xFFFFFFFFFFFFFFFF, dtype=np.uint64)
        return np.log(0.05 + 0.9 * uniforms(seeds, np.arange(num))).astype(np.float32)

    async def logprobs(self, ids: TokensT, *, temperature: float = 1.0) -> LogprobsT:
        """float32[T]: uniform over 256 tokens; entry 0 is NaN."""
        result = np.full(len(ids), -np.log(256.0), dtype=np.float32)
        result[:1] = np.nan
        return result

    async def swap(self, update: WeightUpdate, tensors: Mapping[str, Any]) -> None:
        """Confirm the version, or lie."""
        if self.lies.refuses_swaps:
            raise StaleWeightsError(f"swap to version {update.version}", "the scripted engine refuses it")
        self.swaps.append(update)
        self.version = update.version
        if not self.lies.keeps_old_weights:
            self.served_version = update.version

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """End these requests (all, when None) with half of their answer and stop `aborted`."""
        for key in list(self._running) if ids is None else ids:
            future = self._running.get(key)
            if future is not None and not future.done():
                future.set_result(False)

    async def pause(self) -> None:
        """Requests wait."""
        self._open.clear()

    async def resume(self) -> None:
        """Undo `pause`."""
        self._open.set()

    def stats(self) -> Mapping[str, float]:
        """Tokens and requests since the last call, and what is running."""
        counters, self._counters = self._counters, {"tokens": 0.0, "requests": 0.0}
        return {**counters, "running": float(len(self._running)), "waiting": 0.0, "busy_s": 0.0, "idle_s": 0.0}

    async def close(self) -> None:
        """Running requests raise EngineError."""
        self._is_closed = True
        for future in self._running.values():
            if not future.done():
                future.set_exception(EngineError("engine", "closed while requests were running"))
