"""TRL's half of `make bench-trl`: GRPOTrainer on the workload, in the environment `.venv-trl`; nothing of Triune here.

    .venv-trl/bin/python benchmarks/trl_side.py '{"model": "…", "steps": 6, "report": "side.json"}'

The settings are the fastest found for this trainer on a CPU; see bench_trl.py.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def last_number_reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 where the last number of the text is the answer."""
    found = [NUMBER.findall(completion[0]["content"]) for completion in completions]
    return [float(bool(each) and float(each[-1]) == float(want)) for each, want in zip(found, answer, strict=True)]


def rows(workload: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """The generator's rows as TRL wants them: a conversation, and columns for the reward."""
    import reasoning_gym

    data = reasoning_gym.create_dataset(
        workload["generator"], seed=workload["seed"], size=count, **workload["generator_options"]
    )
    system = {"role": "system", "content": workload["system"]}
    return [
        {"prompt": [system, {"role": "user", "content": row["question"]}], "answer": row["answer"]}
        for row in (data[n] for n in range(count))
    ]


def main() -> None:
    """Train, time every step, write the report."""
    workload = json.loads(sys.argv[1])
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_float32_matmul_precision("medium" if torch.cpu._is_avx512_bf16_supported() else "highest")
    torch.manual_seed(workload["seed"])
    tasks, group, steps = workload["tasks_per_step"], workload["group_size"], workload["steps"]
    marks: list[tuple[float, float]] = []

    class Clock(TrainerCallback):
        """When each optimiser step ended."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append((time.perf_counter(), time.process_time()))

    scratch = Path(workload["report"]).parent / "trl"
    micro = workload.get("micro_batch", tasks * group)
    settings: dict[str, Any] = {
        "output_dir": str(scratch),
        "use_cpu": True,
        "bf16": True,
        "model_init_kwargs": {
            "dtype": workload.get("dtype", "float32"),
            "attn_implementation": workload.get("attention", "sdpa"),
        },
        "gradient_checkpointing": False,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": tasks * group // micro,
        "num_generations": group,
        "max_completion_length": workload["max_tokens"],
        "max_steps": steps,
        "learning_rate": workload["learning_rate"],
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.95,
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "beta": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": workload["seed"],
        **workload.get("settings", {}),
    }
    trainer = GRPOTrainer(
        model=workload["model"],
        reward_funcs=last_number_reward,
        args=GRPOConfig(**settings),
        train_dataset=Dataset.from_list(rows(workload, tasks * (steps + 1))),
        callbacks=[Clock()],
    )
    trainer.train()
    logged = [row for row in trainer.state.log_history if "reward" in row]
    report = {
        "wall_s": [later[0] - earlier[0] for earlier, later in pairwise(marks)],
        "cpu_s": [later[1] - earlier[1] for earlier, later in pairwise(marks)],
        "memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "rewards": [float(row["reward"]) for row in logged],
        "mean_length": [float(row["completions/mean_length"]) for row in logged],
    }
    Path(workload["report"]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
