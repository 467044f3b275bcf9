"""What can only be seen on a GPU: does the same code learn there, and do sampler and trainer agree?

    python -m benchmarks.gpu_check

Runs on whatever device torch has (a CPU too, to try the script itself) and ends with one JSON object. Fails when the
engine's log-probs leave those of the Hugging Face forward, when sampler and trainer drift apart during a run, or when
the run does not learn.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import triune
from triune.explorer.engines.embedded import Embedded, EmbeddedEngine
from triune.launcher import ThreadLane
from triune.models import canonical_state, default_device, resolve_model, weight_digest
from triune.ports import WeightUpdate

TOLERANCE = {"float32": 2e-3, "bfloat16": 0.15}
"""Largest difference of a token's log-prob, in nats; float32 products of a GPU may use TF32."""

STEPS = int(os.environ.get("TRIUNE_GPU_STEPS", "60"))


async def engine_gap(model: str, dtype: str, device: str) -> float:
    """Largest difference between the engine's scores of random ids and the Hugging Face forward's."""
    location = resolve_model(model).location
    reference = AutoModelForCausalLM.from_pretrained(location, dtype=getattr(torch, dtype)).to(device).eval()
    ids = np.random.default_rng(0).integers(0, reference.config.vocab_size, 96).astype(np.int32)
    with torch.no_grad():
        logits = reference(torch.tensor(ids[None], dtype=torch.long, device=device)).logits[0].float()
    expected = logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:, None], device=device).long())[:, 0]
    lane = ThreadLane()
    engine = EmbeddedEngine(location, None, lane, Embedded(dtype=dtype, device=device))
    state = canonical_state(reference)
    await engine.swap(WeightUpdate(version=0, step=0, digest=weight_digest(state), dtype=dtype), state)
    found = await engine.logprobs(ids)
    await engine.close()
    lane.close()
    return float(np.abs(found[1:] - expected.cpu().numpy()).max())


def learn(folder: Path, **model: Any) -> dict[str, Any]:
    """A short run of the quick start."""
    return triune.run(
        {
            "name": "gpu-check",
            "runs_dir": str(folder),
            "model": {"path": "triune/nano", **model},
            "tasks": {"use": "arithmetic", "digits": 2},
            "algorithm": {"use": "grpo", "group_size": 8},
            "explorer": {"max_tokens": 8},
            "trainer": {"steps": STEPS, "tasks_per_step": 32, "learning_rate": 3e-4},
            "monitor": {"sinks": ["jsonl"]},
        },
        restart=True,
    )


def main() -> int:
    """Run every check and print the figures."""
    device = default_device()
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    print(f"device {device} ({name}), torch {torch.__version__}")
    figures: dict[str, Any] = {"device": name}
    failures = []
    for dtype, bound in TOLERANCE.items():
        gap = asyncio.run(engine_gap("triune/nano", dtype, device))
        figures[f"engine_gap_{dtype}"] = gap
        print(f"engine against Hugging Face, {dtype}: largest difference {gap:.2e} nats (bound {bound})")
        if not gap <= bound:
            failures.append(f"engine in {dtype}")
    with tempfile.TemporaryDirectory() as folder:
        metrics = learn(Path(folder))["metrics"]
    reward, gap = metrics["reward"], metrics["logprob_gap"]
    figures |= {
        "reward_first": reward["first"],
        "reward_last": reward["last"],
        "logprob_gap_max": gap["max"],
        "tokens_per_s": metrics["tokens_per_s"]["max"],
    }
    print(f"{STEPS} steps: reward {reward['first']:.2f} → {reward['last']:.2f}, largest log-prob gap {gap['max']:.4f}")
    if not reward["last"] > reward["first"] + 0.2:
        failures.append("the run did not learn")
    if not gap["max"] < 0.1:
        failures.append("sampler and trainer disagree")
    figures["failures"] = failures
    print(json.dumps(figures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
