"""A model behind an OpenAI-compatible endpoint: for judges, teachers, and to measure models we do not train."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from triune.errors import ConfigError, EngineError
from triune.explorer.engines._retrying import RetryingClient
from triune.ports import Completion, GenerateRequest, Lane, Sampling, WeightUpdate
from triune.records import Stop
from triune.registry import brick
from triune.shapes import LogprobsT, TokensT

if TYPE_CHECKING:
    from torch import Tensor

    from triune.models import EndpointSettings

_STOPS = {
    **dict.fromkeys(("stop", "eos", "tool_calls", "function_call"), Stop.DONE),
    "length": Stop.LENGTH,
}
"""What each `finish_reason` means; any other, or none, is an answer that the server broke off (`content_filter`)."""


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What an endpoint answered.

    Attributes:
        text: The message's content; "" when it only calls tools.
        stop: done, length, or aborted: the server broke off (a filter, an error), and the text is a part.
        usage: `prompt_tokens`, `completion_tokens` as the server counted them; empty when it does not.
        tool_calls: As the server sent them.
    """

    text: str
    stop: Stop = Stop.DONE
    usage: Mapping[str, int] = {}
    tool_calls: Sequence[Mapping[str, Any]] = ()


@brick("engine")
@dataclass(frozen=True, kw_only=True)
class Remote:
    """Asks an OpenAI-compatible endpoint instead of sampling here.

    Its weights cannot be swapped, so it serves benches, judges and teachers, not training. `generate` needs a server
    that returns token ids (`return_token_ids`, as vLLM does); `chat` works with any.
    """

    url: str
    """Base address, ending in `/v1`."""

    model: str
    """Name of the model there."""

    api_key_env: str | None = None
    """Environment variable that holds the key; null sends none."""

    max_concurrency: int = 16
    """Requests in flight at once; others wait."""

    timeout_s: float = 120.0
    """Wall-clock limit of one request, its retries not included."""

    retries: int = 3
    """Further tries after a rate limit, a server error or a broken connection, with growing, jittered pauses."""

    max_requests: int | None = None
    """Requests of this engine's whole life, retries included; null = no budget."""

    max_context: int = 32768
    """Positions of the model there."""

    def __call__(
        self,
        model: Any = None,
        tokenizer: Any = None,
        lane: Lane | None = None,
        *,
        keep_kv: bool = False,
        **unused: Any,
    ) -> RemoteEngine:
        """Build the engine; what the embedded engine would need is not used."""
        return RemoteEngine(self)

    @classmethod
    def of(cls, settings: EndpointSettings, *, max_requests: int | None = None) -> Remote:
        """From an entry of `models:` in a run file."""
        return cls(**settings.model_dump(), max_requests=max_requests)


class RemoteEngine:
    """Port `Engine` over HTTP, plus `chat` and `complete` for those who want text.

    Args:
        settings: Where and how to ask.
    """

    def __init__(self, settings: Remote) -> None:
        self.settings = settings
        self.max_context = settings.max_context
        key = None
        if settings.api_key_env is not None:
            key = os.environ.get(settings.api_key_env)
            if not key:
                raise ConfigError(
                    "api_key_env", f"{settings.api_key_env} is not set", "the endpoint's key", "export it"
                )
        self._client = RetryingClient(
            settings.url,
            key=key,
            max_concurrency=settings.max_concurrency,
            timeout_s=settings.timeout_s,
            retries=settings.retries,
            max_requests=settings.max_requests,
        )
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._tokens = 0
        self._open = asyncio.Event()
        self._open.set()

    @property
    def version(self) -> int:
        """0: the endpoint has one set of weights, of which nothing is known."""
        return 0

    # ---- text

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], sampling: Sampling | None = None, **options: Any
    ) -> ChatAnswer:
        """Ask with chat messages.

        Args:
            messages: As OpenAI takes them.
            sampling: How to choose tokens; `stop_ids`, `top_k`, `min_p` and `ignore_eos` are sent only when set,
                because plain OpenAI servers refuse them.
            options: Further fields of the request (`tools`, `response_format`, `seed`, …).

        Raises:
            EngineError: Refused, out of budget, or still failing after the retries.
        """
        body = {"model": self.settings.model, "messages": list(messages), **_fields(sampling), **options}
        answer = await self._client.post("chat/completions", body)
        choice = _choice(answer)
        message = choice.get("message") or {}
        return ChatAnswer(
            text=message.get("content") or "",
            stop=_stop(choice),
            usage=self._usage(answer),
            tool_calls=message.get("tool_calls") or (),
        )

    async def complete(self, prompt: str, sampling: Sampling | None = None, **options: Any) -> ChatAnswer:
        """Continue a text; errors as of `chat`."""
        body = {"model": self.settings.model, "prompt": prompt, **_fields(sampling), **options}
        answer = await self._client.post("completions", body)
        choice = _choice(answer)
        return ChatAnswer(text=choice.get("text") or "", stop=_stop(choice), usage=self._usage(answer))

    def _usage(self, answer: Mapping[str, Any]) -> dict[str, int]:
        usage = answer.get("usage") or {}
        found = {
            name: int(usage[name]) for name in ("prompt_tokens", "completion_tokens") if usage.get(name) is not None
        }
        self._tokens += found.get("completion_tokens", 0)
        return found

    # ---- port

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample by token ids.

        Raises:
            EngineError: The server returns no token ids or log-probs; ids guessed from text would not be those sampled.
        """
        await self._open.wait()
        body = {
            "model": self.settings.model,
            "prompt": np.asarray(request.prompt).tolist(),
            "logprobs": 0,
            "return_token_ids": True,
            "seed": request.seed & 0x7FFFFFFF,
            **_fields(request.sampling),
        }
        task = asyncio.ensure_future(self._client.post("completions", body))
        self._running[request.id] = task
        try:
            choice = _choice(await task)
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                task.cancel()
                raise
            return _completion([], [], Stop.ABORTED)
        finally:
            del self._running[request.id]
        ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if ids is None or logprobs is None or len(ids) != len(logprobs):
            raise EngineError(
                f"request {request.id}",
                f"{self.settings.url} returned text without token ids or log-probs",
                "a server that knows return_token_ids",
                "use chat(), which needs only text",
            )
        self._tokens += len(ids)
        return _completion(ids, logprobs, _stop(choice))

    async def logprobs(self, ids: TokensT, *, temperature: float = 1.0) -> LogprobsT:
        """Not to be had from an OpenAI-compatible endpoint; raises EngineError."""
        raise EngineError(self.settings.url, "scoring of given tokens", "an embedded engine")

    async def swap(self, update: WeightUpdate, tensors: Mapping[str, Tensor]) -> None:
        """Its weights are not ours to change; raises EngineError."""
        where = f"swap to version {update.version}"
        raise EngineError(where, "a remote endpoint", "an engine whose weights can be changed", "use: embedded")

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """End requests of `generate`; what the server has of them is lost."""
        for key in list(self._running) if ids is None else ids:
            if key in self._running:
                self._running[key].cancel()

    async def pause(self) -> None:
        """New requests of `generate` wait."""
        self._open.clear()

    async def resume(self) -> None:
        """Undo `pause`."""
        self._open.set()

    def stats(self) -> Mapping[str, float]:
        """Tokens, requests and retries since the last call; `running` and `waiting` now."""
        tokens, self._tokens = self._tokens, 0
        return {"tokens": float(tokens), **self._client.stats()}

    async def close(self) -> None:
        """Break off what runs and close the connections."""
        await self.abort()
        await self._client.close()


def _fields(sampling: Sampling | None) -> dict[str, Any]:
    if sampling is None:
        return {}
    fields: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
    }
    optional = {
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_ids),
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "ignore_eos": sampling.ignore_eos,
    }
    return {**fields, **{name: value for name, value in optional.items() if value}}


def _choice(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise EngineError("endpoint", f"an answer without choices ({str(answer)[:200]})", "OpenAI's format")
    return choices[0]


def _stop(choice: Mapping[str, Any]) -> Stop:
    return _STOPS.get(choice.get("finish_reason") or "", Stop.ABORTED)


def _completion(ids: Sequence[int], logprobs: Sequence[float], stop: Stop) -> Completion:
    return Completion(
        tokens=np.array(ids, dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
        versions=np.zeros(len(ids), dtype=np.int32),
        stop=stop,
    )
