"""The sequences being decoded, as columns: one numpy operation serves all rows of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from triune.explorer.engines._intake import Job
from triune.explorer.engines._sampler import Choice, Chosen
from triune.ports import Completion
from triune.records import Stop

_NO_STOP = -1


class Rows:
    """State of `num` rows. Row r is live while `jobs[r]` is not None."""

    def __init__(self, num: int) -> None:
        self.jobs: list[Job | None] = [None] * num
        self.is_live = np.zeros(num, dtype=bool)
        self.held = np.zeros(num, dtype=np.int64)  # positions in the cache
        self.fed = np.zeros(num, dtype=np.int64)  # the sampled token that is not in the cache yet
        self.count = np.zeros(num, dtype=np.int64)  # tokens sampled
        self.limit = np.zeros(num, dtype=np.int64)
        self.positions = np.zeros(num, dtype=np.int64)  # that it may come to need
        self.seed = np.zeros(num, dtype=np.uint64)
        self.temperature = np.ones(num, dtype=np.float64)
        self.top_p = np.ones(num, dtype=np.float64)
        self.top_k = np.zeros(num, dtype=np.int64)
        self.min_p = np.zeros(num, dtype=np.float64)
        self.stop_ids = np.full((num, 4), _NO_STOP, dtype=np.int64)
        self.has_stop_text = np.zeros(num, dtype=bool)
        self.is_mixed = np.zeros(num, dtype=bool)  # cache partly of older weights
        self.tokens = np.zeros((num, 32), dtype=np.int32)
        self.versions = np.zeros((num, 32), dtype=np.int32)
        self.logprobs = np.zeros((num, 32), dtype=np.float32)
        self.raw_logprobs = np.zeros((num, 32), dtype=np.float32)

    @property
    def live(self) -> np.ndarray:
        """Live rows, ascending."""
        return np.flatnonzero(self.is_live)

    @property
    def top(self) -> int:
        """One more than the last live row."""
        live = self.live
        return int(live[-1]) + 1 if live.size else 0

    @property
    def need(self) -> int:
        """Positions that the longest live row may come to need."""
        return int(self.positions[self.is_live].max(initial=0))

    def put(self, rows: np.ndarray, jobs: Sequence[Job]) -> None:
        """Make rows live."""
        forms = [job.form for job in jobs]
        sampling = [job.request.sampling for job in jobs]
        self.is_live[rows] = True
        self.count[rows] = 0
        self.is_mixed[rows] = False
        self.held[rows] = [len(form.prompt) for form in forms]
        self.positions[rows] = [form.positions for form in forms]
        self.limit[rows] = [form.limit for form in forms]
        self.seed[rows] = np.array([job.request.seed & 0xFFFFFFFFFFFFFFFF for job in jobs], dtype=np.uint64)
        self.temperature[rows] = [some.temperature for some in sampling]
        self.top_p[rows] = [some.top_p for some in sampling]
        self.top_k[rows] = [some.top_k for some in sampling]
        self.min_p[rows] = [some.min_p for some in sampling]
        self.has_stop_text[rows] = [bool(some.stop) for some in sampling]
        self._put_stop_ids(rows, [form.stop_ids for form in forms])
        for row, job in zip(rows.tolist(), jobs, strict=True):
            self.jobs[row] = job

    def _put_stop_ids(self, rows: np.ndarray, stop_ids: list[np.ndarray]) -> None:
        widest = max(map(len, stop_ids))
        if widest > self.stop_ids.shape[1]:
            extra = np.full((len(self.jobs), widest - self.stop_ids.shape[1]), _NO_STOP, dtype=np.int64)
            self.stop_ids = np.concatenate([self.stop_ids, extra], axis=1)
        self.stop_ids[rows] = _NO_STOP
        for row, ids in zip(rows.tolist(), stop_ids, strict=True):
            if len(ids):
                self.stop_ids[row, : len(ids)] = ids

    def choice(self, rows: np.ndarray, uniform: np.ndarray) -> Choice:
        """How these rows choose their next token."""
        return Choice(
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            top_k=self.top_k[rows],
            min_p=self.min_p[rows],
            uniform=uniform,
        )

    def append(self, rows: np.ndarray, chosen: Chosen, version: int) -> np.ndarray:
        """Record a sampled token of each row; bool[N]: whether a stop id or the limit was met."""
        at = self.count[rows]
        if at.size and at.max() >= self.tokens.shape[1]:
            for name in ("tokens", "versions", "logprobs", "raw_logprobs"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros_like(old)], axis=1))
        self.tokens[rows, at] = chosen.tokens
        self.versions[rows, at] = version
        self.logprobs[rows, at] = chosen.logprobs
        self.raw_logprobs[rows, at] = chosen.raw_logprobs
        self.fed[rows] = chosen.tokens
        self.count[rows] = at + 1
        return self.hit_stop_id(rows) | (at + 1 >= self.limit[rows])

    def hit_stop_id(self, rows: np.ndarray) -> np.ndarray:
        """Whether each row's last token is one that ends it."""
        return (self.stop_ids[rows] == self.fed[rows, None]).any(axis=1)

    def sequence(self, row: int) -> np.ndarray:
        """int32: prompt and sampled tokens."""
        job = self.jobs[row]
        assert job is not None
        return np.concatenate([job.form.prompt, self.tokens[row, : self.count[row]]])

    def take(self, rows: np.ndarray, stops: Sequence[Stop]) -> list[tuple[Job, Completion]]:
        """End rows: they are live no longer. Completions are views of one copy."""
        widest = int(self.count[rows].max())
        tokens, versions = self.tokens[rows, :widest], self.versions[rows, :widest]
        logprobs, raw_logprobs = self.logprobs[rows, :widest], self.raw_logprobs[rows, :widest]
        ended = []
        for i, (row, num, stop) in enumerate(zip(rows.tolist(), self.count[rows].tolist(), stops, strict=True)):
            job = self.jobs[row]
            assert job is not None
            sampling = job.request.sampling
            completion = Completion(
                tokens=tokens[i, :num],
                logprobs=logprobs[i, :num],
                versions=versions[i, :num],
                raw_logprobs=raw_logprobs[i, :num] if sampling.is_truncated and sampling.temperature > 0 else None,
                stop=stop,
            )
            ended.append((job, completion))
            self.jobs[row] = None
        self.is_live[rows] = False
        return ended

    def move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Put live rows into free places."""
        for name, value in vars(self).items():
            if name != "jobs":
                value[targets] = value[sources]
        self.is_live[sources] = False
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self.jobs[target], self.jobs[source] = self.jobs[source], None
