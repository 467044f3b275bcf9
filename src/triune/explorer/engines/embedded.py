"""The embedded engine: continuous batching in this process, on the lane that also trains."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from triune.errors import EngineError
from triune.explorer.engines._intake import Intake, Job
from triune.ports import Completion, GenerateRequest, Lane, WeightUpdate
from triune.registry import brick
from triune.shapes import LogprobsT, TokensT

if TYPE_CHECKING:
    from torch import Tensor


log = logging.getLogger("triune.engine")

Delivery = tuple[Job, Completion]


@brick("engine")
@dataclass(frozen=True, kw_only=True)
class Embedded:
    """Samples in this process: continuous batching over a slot-based key-value cache, on the trainer's compute lane.

    Llama, Qwen2, Qwen3, Mistral and SmolLM models run on a fast path (fused and packed weights); any other causal LM
    runs through its Hugging Face forward. Good for one machine and models that fit it; a large model on GPUs wants a
    server of its own.
    """

    slots: int = 256
    """Sequences decoded at the same time, at most."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What it computes in; `auto` = the model's own, but float32 on a CPU that only emulates bfloat16."""

    max_context: int = 0
    """Positions of prompt plus answer; 0 = as many as the model has."""

    kv_bytes: int = 2 << 30
    """Key-value cache at most; requests that do not fit wait."""

    steps_per_job: int = 16
    """Decode steps before other work of the lane (micro-batches) gets its turn."""

    fast_path: Literal["auto", "never"] = "auto"
    """`never` runs every model through its Hugging Face forward, for comparison."""

    device: str = "auto"
    """`cpu`, `cuda`, …; `auto` = a GPU when there is one."""

    def __call__(
        self,
        model: str | Path | Any,
        tokenizer: Any,
        lane: Lane,
        *,
        keep_kv: bool = False,
        trust_remote_code: bool = False,
    ) -> EmbeddedEngine:
        """Build the engine; weights come by `swap`."""
        return EmbeddedEngine(model, tokenizer, lane, self, keep_kv=keep_kv, trust_remote_code=trust_remote_code)


class EmbeddedEngine:
    """Port `Engine` over torch in this process.

    Requests submitted in one turn of the event loop are admitted together, and a batch submitted together gives the
    same tokens every time. Between jobs on the lane others may use it, so decoding and training alternate.

    Args:
        model: Folder, name (as `model.path`) or a Hugging Face config.
        tokenizer: Anything with `decode(ids)` and, optionally, `eos_token_id`; None when no stop strings are used.
        lane: Where all torch runs.
        settings: Slots, dtype and bounds.
        keep_kv: `sync.kv: keep`: after a swap go on with the cache that the old weights filled.
        trust_remote_code: Run the model folder's own code.
    """

    def __init__(
        self,
        model: str | Path | Any,
        tokenizer: Any,
        lane: Lane,
        settings: Embedded | None = None,
        *,
        keep_kv: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        self.settings = settings or Embedded()
        self._lane, self._tokenizer = lane, tokenizer
        from triune.explorer.engines._build import build_batcher, read_model

        config, eos = read_model(model, tokenizer, trust_remote_code)
        self._batcher = build_batcher(config, self.settings, self._decode, keep_kv)
        self._intake = Intake(
            vocab=self._batcher.vocab,
            max_context=self._batcher.max_context,
            max_positions=self._batcher.max_positions,
            eos=eos,
            has_text=tokenizer is not None,
        )
        self._ids: set[str] = set()
        self._gone: list[Job] = []
        self._task: asyncio.Task[None] | None = None
        self._wake: asyncio.Event | None = None
        self._is_paused = self._is_closed = False
        self._idle_s, self._since = 0.0, time.perf_counter()

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    @property
    def version(self) -> int:
        """The last confirmed version; -1 before the first `swap`."""
        return self._batcher.version

    @property
    def max_context(self) -> int:
        """Positions of prompt plus completion."""
        return self._batcher.max_context

    @property
    def is_fast(self) -> bool:
        """Whether the model runs on the fast path."""
        return self._batcher.decoder.keeps_rows

    @property
    def dtype(self) -> str:
        """What it computes in: float32 or bfloat16."""
        return str(self._batcher.decoder.dtype).removeprefix("torch.")

    # ---- requests

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion.

        Raises:
            EngineError: No weights yet, closed, an id that is already running, an empty prompt, one that leaves no
                position free, or one that the cache could never hold.
        """
        self._check(request)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        job = Job(request, self._intake.form(request), future)
        self._batcher.inbox.append(job)
        self._ids.add(request.id)
        self._ring()
        try:
            return await future
        except asyncio.CancelledError:
            self._gone.append(job)
            self._ring()
            raise
        finally:
            self._ids.discard(request.id)

    def _check(self, request: GenerateRequest) -> None:
        """Raise EngineError for what cannot be decoded now; `Intake` knows what can never be."""
        if self._is_closed:
            raise EngineError(f"request {request.id}", "the engine is closed")
        if self._batcher.version < 0:
            raise EngineError(f"request {request.id}", "no weights yet", "a swap before the first request")
        if request.id in self._ids:
            raise EngineError(f"request {request.id}", "this id is already running", "ids unique while they run")

    async def logprobs(self, ids: TokensT, *, temperature: float = 1.0) -> LogprobsT:
        """float32[T]: log p(ids[t] | ids[:t]) at a temperature; entry 0 is NaN.

        Raises:
            EngineError: No weights yet, more than `max_context` ids, or a temperature that is not above 0.
        """
        if self._batcher.version < 0 or not 1 <= len(ids) <= self.max_context or temperature <= 0:
            found = f"version {self.version}, {len(ids)} ids, temperature {temperature}"
            raise EngineError("logprobs", found, f"weights, 1 … {self.max_context} ids, and a temperature above 0")
        return await self._urgent(self._batcher.score, np.asarray(ids), temperature)

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """End these requests (all, when None) with stop `aborted` and what they have."""
        _resolve(await self._urgent(self._batcher.abort, None if ids is None else set(ids)))

    # ---- weights and control

    async def swap(self, update: WeightUpdate, tensors: Mapping[str, Tensor]) -> None:
        """Take weights between two decode steps; they are copied, and running sequences are prefilled again.

        Raises:
            StaleWeightsError: The digest of what arrived, or the probe of what would be served, is not that of the
                update; the old weights go on.
        """
        await self._urgent(self._batcher.swap, update, tensors)

    async def pause(self) -> None:
        """Stop decoding after the step that runs; requests wait, what they have is kept."""
        self._is_paused = True
        await self._urgent(lambda: None)

    async def resume(self) -> None:
        """Undo `pause`."""
        self._is_paused = False
        self._ring()

    def stats(self) -> Mapping[str, float]:
        """Counters since the last call.

        tokens, prompt_tokens, prefill_tokens, reused_tokens, recomputed_tokens, steps, swaps, aborted, cancelled;
        seconds `busy_s`, `idle_s`, `swap_s`; `running` and `waiting` now.
        """
        now = time.perf_counter()
        counters, span = self._batcher.take_counters(), now - self._since
        self._since = now
        busy = counters.setdefault("busy_s", 0.0)
        mixed = counters.pop("mixed_kv_tokens", 0.0)
        extra = {"mixed_kv_ratio": mixed / max(1.0, counters.get("tokens", 0.0))} if self._batcher.keep_kv else {}
        now_there = {"running": float(self._batcher.num_live), "waiting": float(len(self._batcher.inbox))}
        return {"tokens": 0.0, **counters, "idle_s": max(0.0, span - busy), **now_there, **extra}

    async def close(self) -> None:
        """Free weights and cache; running requests raise EngineError."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail(await self._urgent(self._batcher.fail), EngineError("engine", "closed while requests were running"))

    # ---- the loop

    async def _urgent(self, work: Callable[..., Any], *args: Any) -> Any:
        """Run work on the lane as soon as the step that runs has ended."""
        self._batcher.urgent += 1
        try:
            return await self._lane.run(work, *args)
        finally:
            self._batcher.urgent -= 1
            self._ring()

    def _ring(self) -> None:
        """Wake the loop, and start it where none runs on this event loop."""
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            if self._is_closed:
                return
            self._wake = asyncio.Event()
            self._task = loop.create_task(self._run(), name="engine")
        assert self._wake is not None
        self._wake.set()

    async def _run(self) -> None:
        """Decode while there is anything to decode.

        consumes: requests             waits for: a request, or the end of a pause
        produces: completions          unblocked by: generate, resume
        """
        assert self._wake is not None
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(0)  # whoever submits in this turn of the loop gets in
            if self._gone:
                gone, self._gone = self._gone, []
                await self._lane.run(self._batcher.drop, gone)
            elif self._is_paused or not self._batcher.has_work:
                self._wake.clear()
                await self._wake.wait()
            else:
                await self._decode_some(_Deliver(loop))

    async def _decode_some(self, deliver: _Deliver) -> None:
        """One job on the lane; what fails there fails the requests that were running, and the engine goes on."""
        try:
            await self._lane.run(self._batcher.job, self.settings.steps_per_job, deliver)
        except Exception as error:
            if not isinstance(error, EngineError):
                log.exception("decoding failed")
                error = EngineError("engine", f"{type(error).__name__}: {error}", "", "see the log for the trace")
            self._fail(await self._lane.run(self._batcher.fail), error)

    def _fail(self, jobs: list[Job], error: EngineError) -> None:
        for job in jobs:
            if not job.future.done():
                job.future.set_exception(error)


class _Deliver:
    """Hands completions to the event loop while the lane goes on."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __call__(self, ended: list[Delivery]) -> None:
        self._loop.call_soon_threadsafe(_resolve, ended)


def _resolve(ended: list[Delivery]) -> None:
    for job, completion in ended:
        if not job.future.done():
            job.future.set_result(completion)
