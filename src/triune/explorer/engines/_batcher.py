"""The lane's half of the embedded engine: admits, decodes, swaps. Never touched by the event loop while a job runs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from triune.errors import EngineError, StaleWeightsError
from triune.explorer.engines._admission import plan_admission, session_of
from triune.explorer.engines._decoder import Decoder
from triune.explorer.engines._intake import Job
from triune.explorer.engines._prefixes import Prefixes
from triune.explorer.engines._probe import check_probe
from triune.explorer.engines._rows import Rows
from triune.explorer.engines._sampler import choose
from triune.explorer.engines._stop_text import ends_with_stop
from triune.explorer.engines._uniforms import uniforms
from triune.failpoints import failpoint
from triune.models import weight_digest
from triune.ports import Completion, WeightUpdate
from triune.records import Stop

if TYPE_CHECKING:
    from torch import Tensor

_BUCKET = 64  # positions by which the cache grows
_HOLES = 0.25  # share of dead rows that is stepped over before live ones move up
_TOGETHER = 8  # a full engine waits until one slot in so many is free: four prompts in one forward cost little more


class Batcher:
    """Rows, cache and weights.

    Args:
        decoder: The model.
        slots: Sequences decoded at the same time, at most.
        kv_bytes: Cache size at most.
        decode: Ids to text, for stop strings.
        keep_kv: After a swap go on with the old weights' cache instead of prefilling again.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        slots: int,
        kv_bytes: int,
        vocab: int,
        max_context: int,
        decode: Callable[[list[int]], str],
        keep_kv: bool = False,
    ) -> None:
        self.decoder, self.slots, self.kv_bytes, self.vocab = decoder, slots, kv_bytes, vocab
        self.max_context, self.decode, self.keep_kv = max_context, decode, keep_kv
        self.version = -1
        self.urgent = 0  # how many wait for the lane: end the job after this step
        self.inbox: deque[Job] = deque()
        self.rows = Rows(slots)
        self.prefixes = Prefixes()
        self.counters: dict[str, float] = {}
        self._done: list[tuple[Job, Completion]] = []

    @property
    def num_live(self) -> int:
        """Sequences being decoded."""
        return int(np.count_nonzero(self.rows.is_live))

    @property
    def has_work(self) -> bool:
        """Whether a job would do anything."""
        return bool(self.inbox) or bool(self.rows.is_live.any())

    def _count(self, name: str, value: float) -> None:
        self.counters[name] = self.counters.get(name, 0.0) + value

    # ---- one lane job

    @torch.inference_mode()
    def job(self, steps: int, deliver: Callable[[list[tuple[Job, Completion]]], None]) -> None:
        """Admit what fits, then decode up to `steps` steps; finished requests are delivered after each step."""
        began = time.perf_counter()
        self._admit()
        self._flush(deliver)
        for _ in range(steps):
            if self.urgent or not self.rows.is_live.any():
                break
            if self.inbox and self._could_admit():
                break
            self._step()
            self._flush(deliver)
        if not self.inbox:
            self._close_holes()
        self._count("busy_s", time.perf_counter() - began)

    def _flush(self, deliver: Callable[[list[tuple[Job, Completion]]], None]) -> None:
        if self._done:
            done, self._done = self._done, []
            deliver(done)

    def _step(self) -> None:
        rows, top = self.rows, self.rows.top
        logits = self.decoder.step(rows.fed[:top], rows.held[:top])
        live = rows.live
        rows.held[live] += 1
        self._sample(logits if len(live) == top else logits[torch.from_numpy(live).to(logits.device)], live)
        self._count("steps", 1)

    def _sample(self, logits: Tensor, rows: np.ndarray) -> None:
        state = self.rows
        chosen = choose(logits, state.choice(rows, uniforms(state.seed[rows], state.count[rows])))
        if not np.isfinite(chosen.logprobs).all():
            raise EngineError("engine", "a log-prob that is not finite", "", "look at the weights for NaN or overflow")
        ended = state.append(rows, chosen, self.version)
        self._count("tokens", len(rows))
        if self.keep_kv:
            self._count("mixed_kv_tokens", int(np.count_nonzero(state.is_mixed[rows])))
        texts = rows[state.has_stop_text[rows]]
        by_text = np.array([row for row in texts.tolist() if self._has_stop_text(row)], dtype=np.int64)
        over = rows[ended | np.isin(rows, by_text)] if by_text.size else rows[ended]
        if over.size:
            by_choice = state.hit_stop_id(over) | np.isin(over, by_text)
            self._done += self._end(over, by_choice)

    def _has_stop_text(self, row: int) -> bool:
        job = self.rows.jobs[row]
        assert job is not None
        return ends_with_stop(self.rows.tokens[row, : self.rows.count[row]], job.request.sampling.stop, self.decode)

    def _end(self, rows: np.ndarray, by_choice: np.ndarray) -> list[tuple[Job, Completion]]:
        """End rows, and remember what their cache holds for their sessions' next turns."""
        jobs = [job for job in map(self.rows.jobs.__getitem__, rows.tolist()) if job is not None]
        stops = [
            Stop.DONE if chosen else job.form.limit_stop for job, chosen in zip(jobs, by_choice.tolist(), strict=True)
        ]
        ended = self.rows.take(rows, stops)
        if self.decoder.keeps_rows:
            for row, (job, done) in zip(rows.tolist(), ended, strict=True):
                if session := session_of(job.request.id):
                    self.prefixes.add_session(session, row, job.form.prompt, done.tokens[:-1])
        return ended

    # ---- admission

    def _admit(self) -> None:
        """Take the longest head of the queue that slots and cache have room for, and run its prompts."""
        rows, jobs = self.rows, list[Job]()
        num, need, top = self.num_live, rows.need, rows.top
        if num and self.inbox and not self._could_admit():
            return
        while self.inbox and num + len(jobs) < self.slots:
            wider = max(need, self.inbox[0].form.positions)
            if (num or jobs) and not self._has_room(max(num + len(jobs) + 1, top), wider):
                break
            need = wider
            jobs.append(self.inbox.popleft())
        if jobs:
            jobs.sort(key=lambda job: (len(job.form.prompt), job.request.prefix, job.request.id))
            self._reserve(num + len(jobs), need)
            self._fill(jobs)

    @property
    def max_positions(self) -> int:
        """Positions that the cache could hold for a single request."""
        most = self.kv_bytes // self.decoder.bytes_per_position
        return most if most >= self.max_context else most // _BUCKET * _BUCKET

    def _could_admit(self) -> bool:
        wider, num = max(self.rows.need, self.inbox[0].form.positions), self.num_live
        wanted = max(1, min(len(self.inbox), self.slots // _TOGETHER))
        return num + wanted <= self.slots and self._has_room(max(num + 1, self.rows.top), wider)

    def _has_room(self, num_rows: int, need: int) -> bool:
        return num_rows * _rounded(need, self.max_context) * self.decoder.bytes_per_position <= self.kv_bytes

    def _reserve(self, num_rows: int, need: int) -> None:
        """Grow the cache in buckets; give positions back where their bytes are needed for rows."""
        decoder, num_rows = self.decoder, max(num_rows, self.rows.top)
        capacity = _rounded(need, self.max_context)
        if num_rows <= decoder.num_rows and capacity <= decoder.capacity:
            return
        for rows, positions in (
            (min(max(decoder.num_rows, 2 * num_rows), self.slots), max(decoder.capacity, capacity)),
            (max(decoder.num_rows, num_rows), max(decoder.capacity, capacity)),
            (num_rows, capacity),
        ):
            if rows * positions * decoder.bytes_per_position <= self.kv_bytes:
                break
        for row in range(rows, decoder.num_rows):
            self.prefixes.forget_row(row)
        if positions < decoder.capacity:
            self.prefixes.clear()
        decoder.resize(rows, positions)

    def _fill(self, jobs: list[Job]) -> None:
        """Give every job a row with its prompt in the cache, and sample its first token."""
        plan = plan_admission(jobs, self.rows, self.prefixes, self.decoder.num_rows)
        rows = np.array(plan.rows, dtype=np.int64)
        order: list[int] = []
        parts: list[Tensor] = []
        for share in plan.shared:
            others = rows[share.jobs][rows[share.jobs] != share.row]
            if others.size:
                self.decoder.copy(share.row, others, len(jobs[share.jobs[0]].form.prompt))
            order += share.jobs
            parts.append(share.logits.expand(len(share.jobs), -1))
            self._count("reused_tokens", len(share.jobs) * len(jobs[share.jobs[0]].form.prompt))
        if plan.extended:
            numbers, starts = map(list, zip(*plan.extended, strict=True))
            ids = [jobs[i].form.prompt[start:] for i, start in plan.extended]
            parts.append(self.decoder.extend(ids, rows[numbers], starts))
            order += numbers
            self._count("reused_tokens", sum(starts))
        if plan.fresh:
            parts.append(self._prefill(jobs, rows, plan.fresh))
            order += [i for members in plan.fresh for i in members]
        self._count("prompt_tokens", sum(len(job.form.prompt) for job in jobs))
        rows = rows[order]
        self.rows.put(rows, [jobs[i] for i in order])
        self._sample(parts[0] if len(parts) == 1 else torch.cat(parts), rows)

    def _prefill(self, jobs: list[Job], rows: np.ndarray, fresh: list[list[int]]) -> Tensor:
        """Run prompts once each; logits for every member, in order."""
        prompts = [jobs[members[0]].form.prompt for members in fresh]
        logits = self.decoder.prefill(prompts, [rows[members] for members in fresh])
        num_tokens = sum(map(len, prompts))
        self._count("prefill_tokens", num_tokens)
        self._count("reused_tokens", sum(len(jobs[i].form.prompt) for members in fresh for i in members) - num_tokens)
        if self.decoder.keeps_rows:
            for number, members in enumerate(fresh):
                key = jobs[members[0]].form.key
                if key is not None:
                    self.prefixes.add_prompt(key, int(rows[members[0]]), logits, number)
        source = np.repeat(np.arange(len(fresh)), [len(members) for members in fresh])
        return logits[torch.from_numpy(source).to(logits.device)]

    # ---- housekeeping

    def _close_holes(self) -> None:
        """Move the last live rows into dead places, once there are enough of those to be worth it."""
        live, top = self.rows.live, self.rows.top
        if top - len(live) <= _HOLES * top:
            return
        sources = live[live >= len(live)]
        targets = np.flatnonzero(~self.rows.is_live[: len(live)])
        self.decoder.move(sources, targets, int(self.rows.held[sources].max()))
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self.prefixes.move(source, target)
        self.rows.move(sources, targets)

    def abort(self, ids: set[str] | None) -> list[tuple[Job, Completion]]:
        """End these requests (all, when None), waiting ones too, with what they have."""
        ended = self._remove(lambda job: ids is None or job.request.id in ids)
        self._count("aborted", len(ended))
        return ended

    def drop(self, jobs: list[Job]) -> None:
        """Free the rows of jobs whose callers are gone; their ids may already be in use again."""
        gone = {id(job) for job in jobs}
        self._count("cancelled", len(self._remove(lambda job: id(job) in gone)))

    def _remove(self, is_meant: Callable[[Job], bool]) -> list[tuple[Job, Completion]]:
        live = self.rows.live
        meant = np.array([is_meant(job) for job in self.rows.jobs if job is not None], dtype=bool)
        ended = self.rows.take(live[meant], [Stop.ABORTED] * int(meant.sum())) if meant.any() else []
        for _ in range(len(self.inbox)):
            job = self.inbox.popleft()
            if is_meant(job):
                ended.append((job, _nothing()))
            else:
                self.inbox.append(job)
        return ended

    @torch.inference_mode()
    def swap(self, update: WeightUpdate, tensors: Mapping[str, Tensor]) -> None:
        """Check, copy, check again, and only then serve; running sequences are prefilled again.

        Raises:
            StaleWeightsError: Nothing was changed.
        """
        began = time.perf_counter()
        digest = weight_digest(tensors)
        if digest != update.digest:
            raise StaleWeightsError(
                f"swap to version {update.version}",
                f"received weights have digest {digest}",
                update.digest,
                "the channel delivered other weights than were published",
            )
        staged = self.decoder.stage(tensors)
        check_probe(self.decoder, staged, tensors, update, vocab=self.vocab, max_context=self.max_context)
        self.decoder.commit(staged)
        failpoint("explorer.swap.mid")
        self.version = update.version
        self.prefixes.clear()
        live = self.rows.live
        if live.size and self.keep_kv:
            self.rows.is_mixed[live] = True
        elif live.size:
            sequences = [self.rows.sequence(row)[:-1] for row in live.tolist()]
            self.decoder.prefill(sequences, [np.array([row]) for row in live.tolist()])
            self._count("recomputed_tokens", sum(map(len, sequences)))
        self._count("swaps", 1)
        self._count("swap_s", time.perf_counter() - began)

    @torch.inference_mode()
    def score(self, ids: np.ndarray, temperature: float) -> np.ndarray:
        """float32[T]: log-probs; entry 0 is NaN."""
        result = np.full(len(ids), np.nan, dtype=np.float32)
        if len(ids) > 1:
            result[1:] = self.decoder.score(ids, temperature)
        return result

    def fail(self) -> list[Job]:
        """Forget everything that runs or waits, and the cache with it."""
        jobs = [job for job in self.rows.jobs if job is not None]
        jobs += [self.inbox.popleft() for _ in range(len(self.inbox))]
        self.rows = Rows(self.slots)
        self.prefixes.clear()
        self.decoder.resize(0, 0)
        return jobs

    def take_counters(self) -> dict[str, float]:
        """Counters since the last call."""
        counters, self.counters = self.counters, {}
        return counters


def _rounded(positions: int, max_context: int) -> int:
    """Positions in buckets."""
    return min(-(-positions // _BUCKET) * _BUCKET, max_context)


def _nothing() -> Completion:
    empty = np.zeros(0, dtype=np.float32)
    none = np.zeros(0, dtype=np.int32)
    return Completion(tokens=none, logprobs=empty, versions=none, stop=Stop.ABORTED)
