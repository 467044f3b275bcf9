"""Tokens per second of the embedded engine against `transformers.generate`, in turn in one process.

    python -m benchmarks.bench_engine          (make bench-engine)

SmolLM2-135M in bf16, prompts of 50 tokens, 128 new tokens for 1, 8, 32 and 64 sequences at a time, then a ragged load:
256 prompts whose answers have 8 + geometric(mean 40) tokens, at most 128, on 32 slots; `generate` gets them sorted by
length in batches of 32, which suits it best. Ours counts everything it does besides (scheduler, log-probs, versions).

The ratio is against `generate` in bf16. Where the CPU only emulates bf16 our engine computes in fp32, and so can
`generate`: then it also runs in fp32, and `ratio_vs_generate_fp32` says how much of the ratio is not the dtype
(not within TRIUNE_BENCH_SECONDS).

Smaller: TRIUNE_BENCH_TOKENS=16 TRIUNE_BENCH_REPEATS=1 TRIUNE_BENCH_RAGGED=32 TRIUNE_BENCH_CONCURRENCY=1,8, or
TRIUNE_BENCH_SECONDS=60, which measures once and chooses the tokens of every row from the speeds seen so far.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.baselines import HfGenerate
from benchmarks.limits import Machine, check_baseline, measure
from benchmarks.smollm import fetch
from triune.explorer.engines.embedded import Embedded, EmbeddedEngine
from triune.launcher.lane import ThreadLane
from triune.models import canonical_state, set_float32_matmul, weight_digest
from triune.ports import GenerateRequest, Sampling, WeightUpdate

PROMPT_TOKENS = 50
SLOTS = 32
BF16, FP32 = "generate bf16", "generate fp32"
RECORDED = {1: 40.0, 8: 218.0, 32: 411.0, 64: 458.0}
"""tok/s of `generate` by sequences, on the reference machine."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured; environment variables shrink it."""

    tokens: int
    repeats: int
    ragged: int
    seconds: float
    concurrency: tuple[int, ...]

    @property
    def is_short(self) -> bool:
        """Whether there is a time to keep."""
        return self.seconds < 1e6

    @classmethod
    def read(cls) -> Sizes:
        """From the environment."""
        get = os.environ.get
        return cls(
            tokens=int(get("TRIUNE_BENCH_TOKENS", "128")),
            repeats=int(get("TRIUNE_BENCH_REPEATS", "3")),
            ragged=int(get("TRIUNE_BENCH_RAGGED", "256")),
            seconds=float(get("TRIUNE_BENCH_SECONDS", "1e9")),
            concurrency=tuple(map(int, get("TRIUNE_BENCH_CONCURRENCY", "1,8,32,64").split(","))),
        )


@dataclass(frozen=True)
class Load:
    """Prompts, and how many tokens each is to get."""

    prompts: list[np.ndarray]
    lengths: list[int]

    @property
    def num_tokens(self) -> int:
        """Tokens that are wanted."""
        return sum(self.lengths)


def even_load(num: int, tokens: int) -> Load:
    """`num` prompts with `tokens` new tokens each."""
    generator = np.random.default_rng(num)
    prompts = [generator.integers(100, 40000, PROMPT_TOKENS).astype(np.int32) for _ in range(num)]
    return Load(prompts, [tokens] * num)


def ragged_load(num: int, longest: int) -> Load:
    """Answers of 8 + geometric(mean 40) tokens, capped."""
    lengths = np.minimum(8 + np.random.default_rng(0).geometric(1 / 40, num), longest).tolist()
    return Load(even_load(num, 1).prompts, lengths)


class Ours:
    """The embedded engine over a folder, driven as the explorer drives it."""

    name = "ours"

    def __init__(self, model: Any, folder: Any, slots: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._lane = ThreadLane()
        self.engine = EmbeddedEngine(folder, None, self._lane, Embedded(slots=slots))
        state = canonical_state(model)
        update = WeightUpdate(version=0, step=0, digest=weight_digest(state), dtype="bfloat16")
        began = time.perf_counter()
        self._loop.run_until_complete(self.engine.swap(update, state))
        self.swap_s = time.perf_counter() - began
        self._round = 0

    def run(self, load: Load) -> float:
        """Tokens per second."""
        began = time.perf_counter()
        done = self._loop.run_until_complete(self._ask(load))
        seconds = time.perf_counter() - began
        assert sum(len(one.tokens) for one in done) == load.num_tokens
        return load.num_tokens / seconds

    async def _ask(self, load: Load) -> list[Any]:
        self._round += 1
        requests = [
            GenerateRequest(
                id=f"{self._round}-{i}", prompt=prompt, seed=i, sampling=Sampling(max_tokens=num, ignore_eos=True)
            )
            for i, (prompt, num) in enumerate(zip(load.prompts, load.lengths, strict=True))
        ]
        return await asyncio.gather(*map(self.engine.generate, requests))

    def close(self) -> None:
        """End engine, lane and loop."""
        self._loop.run_until_complete(self.engine.close())
        self._lane.close()
        self._loop.close()


def in_turn(sides: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Run every side once per round, so that what disturbs the machine disturbs all of them."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            found[name].append(side())
    return found


def limit_tok_s(model: Any, num: int, machine: Machine, dtype: torch.dtype) -> float:
    """Decode limit: each step reads all weights once and multiplies them with `num` rows."""
    parameters = sum(weight.numel() for weight in model.parameters())
    flops = 1e9 * (machine.bf16_gflops if dtype == torch.bfloat16 else machine.fp32_medium_gflops)
    step_s = max(parameters * dtype.itemsize / (1e9 * machine.read_gb_s), 2 * parameters * num / flops)
    return num / step_s


class Bench:
    """Both sides, and how much time is left for the rows."""

    def __init__(self, ours: Ours, theirs: Sequence[HfGenerate], sizes: Sizes) -> None:
        self.ours, self.theirs, self.sizes = ours, theirs, sizes
        self._until = time.perf_counter() + sizes.seconds
        self._rows_left = len(sizes.concurrency) + 1
        self._step_s = dict.fromkeys((ours.name, *(side.name for side in theirs)), 0.0)

    def fitting(self, wanted: int, num: int) -> int:
        """Tokens per sequence that fit the row's share of the time, if a step takes as long as in the last row."""
        share_s = (self._until - time.perf_counter()) / self._rows_left
        per_token_s = 2 * sum(self._step_s.values()) * max(1.0, num / 32)
        return wanted if not self.sizes.is_short else max(8, min(wanted, int(share_s / max(per_token_s, 1e-3))))

    def row(self, load: Load, at_a_time: int) -> dict[str, float]:
        """Median tok/s of every side, and median ratios of ours to theirs in the same round."""
        sides: dict[str, Callable[[], float]] = {self.ours.name: lambda: self.ours.run(load)}
        for side in self.theirs:
            sides[side.name] = lambda side=side: side.run(load.prompts, load.lengths, at_a_time)
        found = in_turn(sides, 1 if self.sizes.is_short else self.sizes.repeats)
        self._rows_left = max(1, self._rows_left - 1)
        speed = {name: statistics.median(values) for name, values in found.items()}
        self._step_s = {name: at_a_time / value for name, value in speed.items()}
        for side in self.theirs:
            pairs = zip(found[self.ours.name], found[side.name], strict=True)
            speed[f"ratio {side.name}"] = statistics.median(ours / theirs for ours, theirs in pairs)
        return speed


def show(label: str, row: dict[str, float], end: str = "") -> None:
    """A line of the table."""
    cells = [f"{name} {value:.2f}x" if "ratio" in name else f"{name} {value:7.1f}" for name, value in row.items()]
    print(f"{label:>14s}   {'   '.join(cells)}{end}", flush=True)


def main() -> None:
    """Print the table, and the figures as JSON in the last line."""
    from transformers import AutoModelForCausalLM

    sizes = Sizes.read()
    set_float32_matmul("medium")
    machine = measure()
    print(machine.describe())
    folder = fetch()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ours, theirs = Ours(model, folder, slots=64), [HfGenerate(BF16, model)]
    dtype = getattr(torch, ours.engine.dtype)
    if dtype == torch.float32 and not sizes.is_short:
        theirs.append(HfGenerate(FP32, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)))
    print(f"our engine computes in {ours.engine.dtype}; swap {ours.swap_s * 1000:.0f} ms; tok/s:", flush=True)
    bench = Bench(ours, theirs, sizes)
    bench.row(even_load(1, 4), 1)  # warms up
    bench._rows_left = len(sizes.concurrency) + 1
    rows: dict[str, dict[str, float]] = {}
    for num in sizes.concurrency:
        row = bench.row(even_load(num, bench.fitting(sizes.tokens, num)), num)
        row["share_of_limit"] = row["ours"] / limit_tok_s(model, num, machine, dtype)
        rows[str(num)] = row
        show(
            f"{num} at a time",
            {k: v for k, v in row.items() if k != "share_of_limit"},
            f"   {row['share_of_limit']:.0%} of the limit",
        )
    ours.close()
    bench.ours = Ours(model, folder, slots=SLOTS)
    num = min(sizes.ragged, 2 * SLOTS) if sizes.is_short else sizes.ragged
    row = rows["ragged"] = bench.row(ragged_load(num, bench.fitting(sizes.tokens, num)), SLOTS)
    bench.ours.close()
    show(f"{num} ragged", row)
    if sizes.tokens >= 128 and not sizes.is_short:
        for at_a_time, recorded in RECORDED.items():
            if str(at_a_time) in rows:
                check_baseline(f"generate at {at_a_time}", rows[str(at_a_time)][BF16], recorded, machine)
    print(json.dumps(figures(rows, ours.engine.dtype, machine, sizes)))


def figures(rows: dict[str, dict[str, float]], dtype: str, machine: Machine, sizes: Sizes) -> dict[str, Any]:
    """What the last line says."""
    even = [name for name in rows if name != "ragged"]
    found: dict[str, Any] = {}
    for key, side in (("ratio_vs_generate", BF16), ("ratio_vs_generate_fp32", FP32)):
        if f"ratio {side}" in rows[even[0]]:
            found[key] = {name: round(rows[name][f"ratio {side}"], 3) for name in even}
            found[key.replace("ratio", "ratio_ragged")] = round(rows["ragged"][f"ratio {side}"], 3)
    sides = [name for name in rows[even[0]] if name in ("ours", BF16, FP32)]
    return {
        **found,
        "tokens_per_s": {name: {side: round(row[side], 1) for side in sides} for name, row in rows.items()},
        "share_of_limit": {name: round(rows[name]["share_of_limit"], 3) for name in even},
        "generate_share_of_recorded": {
            name: round(rows[name][BF16] / RECORDED[int(name)], 3) for name in even if int(name) in RECORDED
        },
        "engine_dtype": dtype,
        "machine": machine.to_json(),
        "sizes": vars(sizes),
    }


if __name__ == "__main__":
    main()
