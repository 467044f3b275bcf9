"""A run of seconds for every algorithm of the zoo, on the shipped model: what it reads is made here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from triune import registry

LEARNING_RATE = 3e-4
NUM_ROWS = 4096


def zoo_run(algorithm: str, folder: Path, *, steps: int, seed: int = 0, size: int = 32) -> dict[str, Any]:
    """Configuration of a run in which an algorithm of the zoo learns sums of two-digit numbers.

    Algorithms that sample get tasks; those that read get a file of rows with right (and, where wanted, wrong) answers.
    A teacher is the model in `folder/teacher`; where there is none, the shipped one with noise in its weights.

    Args:
        algorithm: Name in the zoo.
        folder: Of rows and runs; the run is `folder/runs/<algorithm>-<seed>`.
        steps: Steps of the run.
        seed: Of the run.
        size: Tasks of a step with eight rollouts each; eight times as many sequences, twice as many pairs.
    """
    brick = registry.build("algorithm", {"use": algorithm}, "algorithm")
    reads = getattr(brick, "reads", "answers")
    unit = getattr(brick, "unit", None)
    samples = "advantages" in brick.needs
    config: dict[str, Any] = {
        "name": f"{algorithm}-{seed}",
        "runs_dir": str(folder / "runs"),
        "seed": seed,
        "model": {"path": "triune/nano"},
        "tasks": {"use": "arithmetic", "digits": 2},
        "eval": {"every": steps, "tasks": {"use": "arithmetic", "digits": 2, "size": 400, "name": "held_out"}},
        "algorithm": {"use": algorithm, **OPTIONS.get(algorithm, {})},
        "explorer": {"max_tokens": 8},
        "trainer": {"steps": steps, "learning_rate": RATES.get(algorithm, LEARNING_RATE), "save_every": steps},
        "monitor": {"sinks": ["jsonl"], "curve": False},
    }
    trainer = config["trainer"]
    if samples:
        trainer["tasks_per_step"] = size * 8 // brick.group_size
    else:
        trainer["pairs_per_step" if unit == "pair" else "sequences_per_step"] = size * (2 if unit == "pair" else 8)
        config["tasks"] = {"use": "jsonl", "path": str(save_rows(folder, reads))}
    if "expert" in getattr(brick.sampling, "buffers", ()):
        config["expert"] = {"use": "jsonl", "path": str(save_rows(folder, "answers"))}
    if "teacher_logprobs" in brick.needs:
        config["teacher"] = {"path": str(save_teacher(folder))}
    return config


def save_rows(folder: Path, reads: str) -> Path:
    """Write `answers`, `labels`, `pairs` or `texts` as a jsonl, where it is not there yet."""
    path = folder / f"{reads}.jsonl"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[reads]()))
    return path


def save_teacher(folder: Path) -> Path:
    """The folder of the teacher; made, of another opinion than the shipped model, where there is none."""
    path = folder / "teacher"
    if not path.exists():
        import torch

        from triune.models import ModelSettings, export_model, load_model, resolve_model

        model, chance = load_model(ModelSettings(path="triune/nano"), "cpu"), torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.02 * torch.randn(weight.shape, generator=chance)
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(resolve_model("triune/nano").location)
        export_model(model, path, tokenizer=tokenizer, source_name="triune/nano")
    return path


def _sums() -> Iterator[tuple[str, str, str]]:
    """Question, right answer, wrong answer."""
    chance = np.random.default_rng(1)
    for first, second in chance.integers(0, 100, (NUM_ROWS, 2)).tolist():
        off = int(chance.choice([-10, -2, -1, 1, 2, 10]))
        right = first + second
        yield f"{first}+{second}=", str(right), str(right + off if right + off >= 0 else right - off)


def _answers() -> Iterator[Mapping[str, Any]]:
    for question, right, _ in _sums():
        yield {"question": question, "answer": right}


def _pairs() -> Iterator[Mapping[str, Any]]:
    for question, right, wrong in _sums():
        yield {"question": question, "chosen": right, "rejected": wrong}


def _labels() -> Iterator[Mapping[str, Any]]:
    for number, (question, right, wrong) in enumerate(_sums()):
        is_right = number % 2 == 0
        yield {"question": question, "answer": right if is_right else wrong, "label": is_right}


def _texts() -> Iterator[Mapping[str, Any]]:
    """Whole conversations as plain text, with the template's own marks."""
    from triune.models import ChatTokenizer, resolve_model

    tokenizer = ChatTokenizer.load(resolve_model("triune/nano").location)
    for question, right, _ in _sums():
        said = [{"role": "user", "content": question}, {"role": "assistant", "content": right}]
        yield {"text": tokenizer.render(said, generate=False)}


ROWS: Mapping[str, Callable[[], Iterator[Mapping[str, Any]]]] = {
    "answers": _answers,
    "labels": _labels,
    "pairs": _pairs,
    "texts": _texts,
}

OPTIONS: Mapping[str, Mapping[str, Any]] = {}
"""Settings of an algorithm that its defaults, made for models a thousand times larger, do not suit here."""

RATES: Mapping[str, float] = {}
"""Learning rates, likewise."""
