"""Makes a run repeatable: decoding starts only when every live rollout waits, and in the order of their names."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from triune.ports import Completion, Engine, GenerateRequest, WeightUpdate
from triune.shapes import LogprobsT, TokensT


class WaveGate:
    """An engine around an engine, for `deterministic: true`.

    Which requests share a batch decides the last bits of their logits, and normally arrival times decide which do.
    Here a wave of requests is collected until every rollout that was announced by `enter` has either asked or left;
    then all go to the engine at once, ordered by id. The next wave starts when all of this one have been answered.

    Args:
        engine: What really samples.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._live: set[str] = set()
        self._asked: dict[str, tuple[GenerateRequest, asyncio.Future[Completion]]] = {}
        self._decoding = 0
        self._held = 0
        self._checks = False

    # ------------------------------------------------------------------------------------------------- the wave

    def enter(self, rollout: str) -> None:
        """A rollout is live: no wave starts without it."""
        self._live.add(rollout)

    def leave(self, rollout: str) -> None:
        """A rollout has ended."""
        self._live.discard(rollout)
        self._check_soon()

    def hold(self) -> None:
        """No wave starts until `release`: more rollouts are about to enter."""
        self._held += 1

    def release(self) -> None:
        """Undo `hold`."""
        self._held -= 1
        self._check_soon()

    async def generate(self, request: GenerateRequest) -> Completion:
        """Wait for the wave, then sample."""
        result: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._asked[request.id] = (request, result)
        self._check_soon()
        try:
            return await result
        finally:
            self._asked.pop(request.id, None)

    def _check_soon(self) -> None:
        """Look after everything that is ready now has run, so that answers of one decode step are taken together."""
        if not self._checks:
            self._checks = True
            asyncio.get_running_loop().call_soon(self._check)

    def _check(self) -> None:
        self._checks = False
        if self._held or self._decoding or not self._asked:
            return
        waiting = {request_id.rpartition("/")[0] for request_id in self._asked}
        if not self._live <= waiting:
            return
        wave = [self._asked[request_id] for request_id in sorted(self._asked, key=_natural)]
        self._asked.clear()
        self._decoding = len(wave)
        for request, result in wave:
            task = asyncio.ensure_future(self._engine.generate(request))
            task.add_done_callback(lambda task, result=result: self._answer(task, result))
            result.add_done_callback(lambda result, task=task: task.cancel() if result.cancelled() else None)

    def _answer(self, task: asyncio.Future[Completion], result: asyncio.Future[Completion]) -> None:
        self._decoding -= 1
        if not result.done():
            if task.cancelled():
                result.cancel()
            elif (error := task.exception()) is not None:
                result.set_exception(error)
            else:
                result.set_result(task.result())
        self._check_soon()

    # ------------------------------------------------------------------------------------------- the engine's own

    @property
    def version(self) -> int:
        """See `Engine.version`."""
        return self._engine.version

    @property
    def max_context(self) -> int:
        """See `Engine.max_context`."""
        return self._engine.max_context

    async def logprobs(self, ids: TokensT, *, temperature: float = 1.0) -> LogprobsT:
        """See `Engine.logprobs`."""
        return await self._engine.logprobs(ids, temperature=temperature)

    async def swap(self, update: WeightUpdate, tensors: Mapping[str, Any]) -> None:
        """See `Engine.swap`."""
        await self._engine.swap(update, tensors)

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """See `Engine.abort`."""
        await self._engine.abort(ids)

    async def pause(self) -> None:
        """See `Engine.pause`."""
        await self._engine.pause()

    async def resume(self) -> None:
        """See `Engine.resume`."""
        await self._engine.resume()

    def stats(self) -> Mapping[str, float]:
        """See `Engine.stats`."""
        return self._engine.stats()

    async def close(self) -> None:
        """See `Engine.close`."""
        await self._engine.close()


def _natural(request_id: str) -> tuple[Any, ...]:
    """Order by group, then by numbers of member, attempt and turn as numbers."""
    rollout, _, turn = request_id.rpartition("/")
    group, _, last = rollout.rpartition("/")
    member, _, attempt = last.partition(".")
    return group, int(member), int(attempt), int(turn)
