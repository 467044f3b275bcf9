"""An engine around the run's engine that writes down what was asked and what was answered, token for token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from triune.ports import Completion, GenerateRequest


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request with its completion, as they passed the engine's door."""

    request: GenerateRequest
    completion: Completion

    @property
    def rollout(self) -> str:
        """`str` of the rollout that asked."""
        return self.request.id.rpartition("/")[0]

    @property
    def turn(self) -> int:
        """Number of the call inside its rollout."""
        return int(self.request.id.rpartition("/")[2])


class Recorder:
    """Hands everything on, and keeps what was sampled.

    Args:
        engine: The run's.
        calls: Where calls are kept.
    """

    def __init__(self, engine: Any, calls: list[Call]) -> None:
        self._engine, self._calls = engine, calls

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample, and keep."""
        completion = await self._engine.generate(request)
        self._calls.append(Call(request=request, completion=completion))
        return completion

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The brick `explorer.engine` of a run, whose engine is recorded."""

    inner: Any
    calls: list[Call] = field(default_factory=list)

    def __call__(self, *given: Any, **named: Any) -> Recorder:
        """Build the engine."""
        return Recorder(self.inner(*given, **named), self.calls)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
