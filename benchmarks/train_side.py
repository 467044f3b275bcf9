"""One side of `bench_train` in a process of its own: `python -m benchmarks.train_side '{"side": "triune", …}'`.

The last line is one JSON object: wall-clock and processor seconds of every step, losses, peak memory in MiB.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.baselines import HfPaddedLoop
from benchmarks.smollm import fetch
from triune.models import set_float32_matmul

Sequences = list[tuple[list[int], int]]


def ragged(num: int, longest: int, seed: int = 0) -> Sequences:
    """Prompts of 16 to 64 ids and answers of 16 + geometric(mean 100), at most `longest`: (ids, prompt ids)."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(num):
        prompt, answer = int(rng.integers(16, 65)), int(min(16 + rng.geometric(0.01), longest))
        found.append((rng.integers(100, 40000, prompt + answer).tolist(), prompt))
    return found


def grouped(num: int, size: int = 8) -> Sequences:
    """Groups of `size` answers of 16 ids to one prompt of 60 ids, as in GRPO with short answers."""
    rng = np.random.default_rng(1)
    found = []
    for _ in range(num // size):
        prompt = rng.integers(100, 40000, 60).tolist()
        found += [(prompt + rng.integers(100, 40000, 16).tolist(), 60) for _ in range(size)]
    return found


def main(case: dict[str, Any]) -> dict[str, Any]:
    """Time `case["steps"]` steps after one that warms up."""
    torch.set_num_threads(case["threads"])
    sequences = grouped(case["sequences"]) if case["load"] == "grouped" else ragged(case["sequences"], case["longest"])
    step = (_triune if case["side"] == "triune" else _hf)(case, sequences)
    losses, seconds, cpu_seconds = [step()], [], []
    for _ in range(case["steps"]):
        start, cpu_start = time.perf_counter(), time.process_time()
        losses.append(step())
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "losses": losses,
        "tokens": sum(len(ids) for ids, _ in sequences),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _load(case: dict[str, Any]) -> Any:
    from triune.models import LoraSettings, ModelSettings, load_model

    lora = LoraSettings(rank=16, alpha=32) if case["lora"] else None
    dtype = "bfloat16" if case["precision"] == "pure" else "float32"
    return load_model(ModelSettings(path=str(fetch()), dtype=dtype, lora=lora))


def _hf(case: dict[str, Any], sequences: Sequences) -> Callable[[], float]:
    set_float32_matmul("medium")
    loop = HfPaddedLoop(_load(case), autocast=case["precision"] == "bfloat16", micro_batch=case["micro_batch"])
    return lambda: loop.step(sequences)


def _triune(case: dict[str, Any], sequences: Sequences) -> Callable[[], float]:
    from triune import registry
    from triune.testing.lanes import InlineLane
    from triune.trainer import Policy, TrainerSettings
    from triune.trainer.batch import build_batch
    from triune.trainer.optimiser import Optimiser
    from triune.trainer.updates import Tally, Updater

    settings = TrainerSettings(learning_rate=1e-5)
    policy = Policy(_load(case), precision="bfloat16" if case["precision"] == "bfloat16" else "float32")
    algorithm = registry.build("algorithm", "sft", "algorithm")
    updater = Updater(policy, algorithm, Optimiser(policy.trainable, settings), settings, InlineLane())
    leases = _leases(sequences)

    def step() -> float:
        tally = Tally()
        batch = build_batch(
            leases,
            streams=(),
            mini_batches=1,
            budget=case.get("budget") or policy.tokens_per_micro_batch,
            seed=(0,),
            device="cpu",
        )
        asyncio.run(updater.run(batch.minis[0], step=0, num_rollouts=len(sequences), tally=tally))
        return tally.means()["loss"]

    return step


def _leases(sequences: Sequences) -> Sequence[Any]:
    from triune.ports import Lease
    from triune.records import Experience, ExperienceId, Group, GroupId, RolloutId, Source, Task

    leases = []
    for number, (ids, prompt) in enumerate(sequences):
        group = GroupId("bench", "train", str(number), 0)
        nothing = np.full(len(ids), np.nan, np.float32)
        row = Experience(
            id=ExperienceId(RolloutId(group, 0)),
            tokens=np.array(ids, np.int32),
            action_mask=np.arange(len(ids)) >= prompt,
            logprobs=nothing,
            versions=np.full(len(ids), -1, np.int32),
            source=Source.EXPERT,
        )
        entry = Group(id=group, task=Task(key=str(number)), records=(row,))
        leases.append(Lease(entry=str(group), revision=0, use_no=0, group=entry))
    return leases


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
