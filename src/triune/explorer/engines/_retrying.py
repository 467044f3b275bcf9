"""One HTTP client for an endpoint: bounded concurrency, retries with jitter, a budget, and clear errors."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from triune.errors import EngineError

if TYPE_CHECKING:
    import httpx

_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_HINTS = {401: "check the key in api_key_env", 403: "check the key in api_key_env", 404: "check url and model"}


class RetryingClient:
    """Posts JSON to one base address.

    Args:
        url: Base address.
        key: Sent as a bearer token; None sends none.
        max_concurrency: Requests in flight.
        timeout_s: Wall-clock limit of one try.
        retries: Further tries.
        max_requests: Tries in all; None = no budget.
        first_pause_s: Pause before the first retry; it doubles, and each is drawn from [half, whole].
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None,
        max_concurrency: int,
        timeout_s: float,
        retries: int,
        max_requests: int | None = None,
        first_pause_s: float = _FIRST_PAUSE_S,
    ) -> None:
        self.url = url.rstrip("/")
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._slots = asyncio.Semaphore(max_concurrency)
        self._timeout_s, self._retries, self._left = timeout_s, retries, max_requests
        self._first_pause_s = first_pause_s
        self._client: httpx.AsyncClient | None = None
        self._counters = {"requests": 0.0, "retries": 0.0}
        self._asked = self._running = 0

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send and read JSON.

        Raises:
            EngineError: The server refused, the budget is used up, or every try failed.
        """
        self._asked += 1
        try:
            async with self._slots:
                self._running += 1
                try:
                    return await self._tries(f"{self.url}/{path}", body)
                finally:
                    self._running -= 1
        finally:
            self._asked -= 1

    async def _tries(self, address: str, body: Mapping[str, Any]) -> dict[str, Any]:
        found = ""
        for number in range(self._retries + 1):
            if number:
                self._counters["retries"] += 1
            self._spend(address)
            found, pause_s, answer = await self._try(address, body)
            if answer is not None:
                return answer
            if number < self._retries:
                await asyncio.sleep(max(pause_s, self._pause_s(number)))
        raise EngineError(
            address, f"{found}, {self._retries + 1} times", "an answer", "is the server up and not overloaded?"
        )

    async def _try(self, address: str, body: Mapping[str, Any]) -> tuple[str, float, dict[str, Any] | None]:
        """What went wrong, the pause the server asks for, and the answer if there is one."""
        import httpx

        if self._client is None:
            limits = httpx.Limits(max_connections=None)
            self._client = httpx.AsyncClient(headers=self._headers, timeout=None, limits=limits, trust_env=False)
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._client.post(address, json=dict(body))
        except TimeoutError:
            return f"no answer within {self._timeout_s:g} s", 0.0, None
        except httpx.TransportError as error:
            return f"{type(error).__name__} {error}".strip(), 0.0, None
        if response.status_code in _RETRIED:
            return f"status {response.status_code}", _seconds(response.headers.get("retry-after")), None
        if response.status_code >= 400:
            hint = _HINTS.get(response.status_code, "")
            raise EngineError(address, f"status {response.status_code}: {response.text[:300]}", "an answer", hint)
        try:
            answer = response.json()
        except ValueError:
            raise EngineError(address, f"no JSON: {response.text[:200]!r}", "OpenAI's format", "check url") from None
        if not isinstance(answer, dict):
            raise EngineError(address, f"JSON of type {type(answer).__name__}", "an object", "check url")
        return "", 0.0, answer

    def _spend(self, address: str) -> None:
        self._counters["requests"] += 1
        if self._left is not None:
            if self._left <= 0:
                raise EngineError(address, "the budget of requests is used up", "", "raise max_requests")
            self._left -= 1

    def _pause_s(self, number: int) -> float:
        whole = min(self._first_pause_s * 2**number, _LONGEST_PAUSE_S)
        return whole * random.uniform(0.5, 1.0)

    def stats(self) -> dict[str, float]:
        """Requests and retries since the last call; running and waiting now."""
        counters, self._counters = self._counters, {"requests": 0.0, "retries": 0.0}
        return {**counters, "running": float(self._running), "waiting": float(self._asked - self._running)}

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None


def _seconds(text: str | None) -> float:
    """`retry-after` in seconds; dates and nonsense count as 0."""
    try:
        return min(max(float(text or 0), 0.0), _LONGEST_PAUSE_S)
    except ValueError:
        return 0.0
