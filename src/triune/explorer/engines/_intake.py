"""From a request to a job: everything that can never be decoded is refused here, on the caller's stack."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np

from triune.errors import EngineError
from triune.ports import Completion, GenerateRequest, Sampling
from triune.records import Stop


class Form(msgspec.Struct, frozen=True, eq=False):
    """What members of a group have in common.

    Attributes:
        prompt: int32[P].
        limit: Tokens to sample at most.
        limit_stop: Why it ends when the limit is met.
        stop_ids: Tokens that end it.
        key: Identity of the prompt for sharing; None = not shared.
    """

    prompt: np.ndarray
    limit: int
    limit_stop: Stop
    stop_ids: np.ndarray
    key: tuple[str, bytes] | None

    @property
    def positions(self) -> int:
        """Positions it may come to need."""
        return len(self.prompt) + self.limit


class Job(msgspec.Struct, frozen=True, eq=False):
    """A request with where its completion goes."""

    request: GenerateRequest
    form: Form
    future: asyncio.Future[Completion]


class Intake:
    """Checks requests; what it worked out for one member of a group serves the next.

    Args:
        vocab: Ids the model knows.
        max_context: Positions.
        max_positions: Positions that the cache could hold for a single request.
        eos: Ids that end every answer.
        has_text: Whether ids can be decoded, which stop strings need.
    """

    def __init__(
        self, *, vocab: int, max_context: int, max_positions: int, eos: tuple[int, ...], has_text: bool
    ) -> None:
        self.vocab, self.max_context, self.max_positions = vocab, max_context, max_positions
        self.eos, self.has_text = eos, has_text
        self._last: tuple[Any, Sampling, str, Form] | None = None

    def form(self, request: GenerateRequest) -> Form:
        """Check a request.

        Raises:
            EngineError: It can never be decoded.
        """
        last = self._last
        if last is not None and last[0] is request.prompt and last[1] == request.sampling and last[2] == request.prefix:
            return last[3]
        form = self._form(request)
        self._last = (request.prompt, request.sampling, request.prefix, form)
        return form

    def _form(self, request: GenerateRequest) -> Form:
        sampling = request.sampling
        prompt = np.array(request.prompt, dtype=np.int32)
        self._check_prompt(request.id, prompt)
        self._check_sampling(request.id, sampling)
        room = self.max_context - len(prompt)
        limit = min(sampling.max_tokens, room)
        if len(prompt) + limit > self.max_positions:
            found, most = f"{len(prompt)} + {limit} positions", f"at most {self.max_positions}, which kv_bytes can hold"
            raise EngineError(f"request {request.id}", found, most, "raise explorer.engine.kv_bytes")
        stops = sampling.stop_ids if sampling.ignore_eos else (*self.eos, *sampling.stop_ids)
        return Form(
            prompt,
            limit,
            Stop.LENGTH if sampling.max_tokens <= room else Stop.CONTEXT,
            np.array(stops, dtype=np.int64),
            (request.prefix, prompt.tobytes()) if request.prefix else None,
        )

    def _check_prompt(self, request: str, prompt: np.ndarray) -> None:
        where = f"request {request}"
        if prompt.ndim != 1 or not len(prompt):
            raise EngineError(where, f"a prompt of shape {prompt.shape}", "at least one token id")
        if prompt.min() < 0 or prompt.max() >= self.vocab:
            raise EngineError(where, f"token ids {prompt.min()} … {prompt.max()}", f"0 … {self.vocab - 1}")
        if len(prompt) >= self.max_context:
            expected = f"fewer than max_context = {self.max_context}"
            raise EngineError(where, f"a prompt of {len(prompt)} tokens", expected, "shorten the conversation")

    def _check_sampling(self, request: str, sampling: Sampling) -> None:
        where = f"request {request}"
        if sampling.max_tokens < 1 or not sampling.temperature >= 0:
            found = f"max_tokens {sampling.max_tokens}, temperature {sampling.temperature}"
            raise EngineError(where, found, "at least one token, and no negative temperature")
        if not (0 < sampling.top_p <= 1 and sampling.top_k >= 0 and 0 <= sampling.min_p <= 1):
            found = f"top_p {sampling.top_p}, top_k {sampling.top_k}, min_p {sampling.min_p}"
            raise EngineError(where, found, "top_p in (0, 1], top_k 0 or more, min_p in [0, 1]")
        if sampling.stop and not self.has_text:
            raise EngineError(where, "stop strings", "an engine with a tokenizer", "use stop_ids")
        if not all(sampling.stop):
            raise EngineError(where, "an empty stop string", "text", "leave it out")
