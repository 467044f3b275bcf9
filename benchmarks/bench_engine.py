"""Tokens per second of the embedded engine against `transformers.generate`, in turn in one process.

    python -m benchmarks.bench_engine          (make bench-engine)

SmolLM2-135M in bf16, prompts of 50 tokens, 128 new tokens for 1, 8, 32 and 64 sequences at a time, then a ragged load:
256 prompts whose answers have 8 + geometric(mean 40) tokens, at most 128, on 32 slots; `generate` gets them sorted by
length in batches of 32, which suits it best. Ours counts everything it does besides (scheduler, log-probs, versions).

Where the CPU only emulates bf16, `generate` also runs in fp32, and the faster of its two figures is the opponent.

Smaller: TRIUNE_BENCH_TOKENS=16 TRIUNE_BENCH_REPEATS=1 TRIUNE_BENCH_RAGGED=32 TRIUNE_BENCH_CONCURRENCY=1,8, or
TRIUNE_BENCH_SECONDS=60, which stops repeating when so much time is used (every row is measured once at least).
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
from triune.explorer.engines._linear import has_fast_bfloat16
from triune.explorer.engines.embedded import Embedded, EmbeddedEngine
from triune.launcher.lane import ThreadLane
from triune.models import canonical_state, weight_digest
from triune.ports import GenerateRequest, Sampling, WeightUpdate

PROMPT_TOKENS = 50
SLOTS = 32
RECORDED = {1: 40.0, 8: 218.0, 32: 411.0, 64: 458.0}
"""tok/s of `generate` by sequences, on the reference machine (ECOSYSTEM.md, section 3)."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured; environment variables shrink it."""

    tokens: int
    repeats: int
    ragged: int
    seconds: float
    concurrency: tuple[int, ...]

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

    def __init__(self, model: Any, folder: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._lane = ThreadLane()
        self.engine = EmbeddedEngine(folder, None, self._lane, Embedded(slots=64))
        state = canonical_state(model)
        update = WeightUpdate(version=0, step=0, digest=weight_digest(state), dtype="bfloat16")
        began = time.perf_counter()
        self._loop.run_until_complete(self.engine.swap(update, state))
        self.swap_s = time.perf_counter() - began
        self._round = 0

    def run(self, load: Load, slots: int) -> float:
        """Tokens per second; at most `slots` sequences at a time."""
        self.engine._batcher.slots = slots
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
        """End lane and loop."""
        self._loop.run_until_complete(self.engine.close())
        self._lane.close()
        self._loop.close()


def in_turn(sides: dict[str, Callable[[], float]], repeats: int, until: float) -> dict[str, list[float]]:
    """Run every side once per round, so that what disturbs the machine disturbs all of them."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(repeats):
        if number and time.perf_counter() > until:
            break
        for name, side in sides.items():
            found[name].append(side())
    return found


def limit_tok_s(model: Any, num: int, machine: Machine, dtype: torch.dtype) -> float:
    """Decode limit: each step reads all weights once and multiplies them with `num` rows."""
    parameters = sum(weight.numel() for weight in model.parameters())
    flops = 1e9 * (machine.bf16_gflops if dtype == torch.bfloat16 else machine.fp32_medium_gflops)
    step_s = max(parameters * dtype.itemsize / (1e9 * machine.read_gb_s), 2 * parameters * num / flops)
    return num / step_s


def compare(
    name: str, load: Load, slots: int, ours: Ours, theirs: Sequence[HfGenerate], sizes: Sizes, until: float
) -> Any:
    """One row of the table."""
    sides: dict[str, Callable[[], float]] = {"ours": lambda: ours.run(load, slots)}
    for side in theirs:
        sides[side.name] = lambda side=side: side.run(load.prompts, load.lengths, slots)
    found = in_turn(sides, sizes.repeats, until)
    speed = {side: statistics.median(values) for side, values in found.items()}
    best = max((side.name for side in theirs), key=lambda side: speed[side])
    ratio = statistics.median(a / b for a, b in zip(found["ours"], found[best], strict=True))
    shown = "   ".join(f"{side} {value:7.1f}" for side, value in speed.items())
    return {"name": name, "speed": speed, "best": best, "ratio": ratio, "shown": shown}


def main() -> None:
    """Print the table, and the figures as JSON in the last line."""
    from transformers import AutoModelForCausalLM

    sizes, began = Sizes.read(), time.perf_counter()
    torch.set_float32_matmul_precision("medium")
    machine = measure()
    print(machine.describe())
    folder = fetch()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    theirs = [HfGenerate("generate bf16", model)]
    if not has_fast_bfloat16():
        theirs.append(HfGenerate("generate fp32", AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)))
    ours = Ours(model, folder)
    warm = even_load(2, 4)
    ours.run(warm, 2)
    for side in theirs:
        side.run(warm.prompts, warm.lengths, 2)
    dtype = ours.engine._batcher.decoder.dtype
    print(f"our engine computes in {str(dtype).removeprefix('torch.')}; swap {ours.swap_s * 1000:.0f} ms; tok/s:")
    rows, until = {}, began + 0.6 * sizes.seconds
    for num in sizes.concurrency:
        row = compare(f"{num}", even_load(num, sizes.tokens), num, ours, theirs, sizes, until)
        row["share_of_limit"] = row["speed"]["ours"] / limit_tok_s(model, num, machine, dtype)
        rows[num] = row
        print(f"{num:4d} at a time  {row['shown']}   {row['ratio']:.2f}x   {row['share_of_limit']:.0%} of the limit")
    ragged = compare("ragged", ragged_load(sizes.ragged, sizes.tokens), SLOTS, ours, theirs, sizes, until)
    print(f"{sizes.ragged:4d} ragged     {ragged['shown']}   {ragged['ratio']:.2f}x")
    ours.close()
    figures = {
        "ratio_vs_generate": {str(num): round(row["ratio"], 3) for num, row in rows.items()},
        "ratio_ragged": round(ragged["ratio"], 3),
        "opponent": {**{str(num): row["best"] for num, row in rows.items()}, "ragged": ragged["best"]},
        "tokens_per_s": {**{str(num): row["speed"] for num, row in rows.items()}, "ragged": ragged["speed"]},
        "share_of_limit": {str(num): round(row["share_of_limit"], 3) for num, row in rows.items()},
        "engine_dtype": str(dtype).removeprefix("torch."),
        "machine": machine.to_json(),
        "sizes": vars(sizes),
    }
    if sizes.tokens >= 128:
        for num, row in rows.items():
            if num in RECORDED:
                check_baseline(f"generate at {num}", row["speed"][row["best"]], RECORDED[num], machine)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
