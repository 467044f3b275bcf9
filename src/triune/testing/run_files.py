"""Run files of real runs that take seconds: a tiny random model, a few tasks, and what follows from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triune.testing.chats import byte_tokenizer
from triune.testing.tiny_models import tiny_llama


def save_tiny_policy(folder: Path, *, hidden: int = 32, seed: int = 0) -> Path:
    """Write a random two-layer Llama with a byte tokenizer and a chat template: a model any text can be sent to."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = byte_tokenizer()
    model = tiny_llama(vocab=len(tokenizer), hidden=hidden, seed=seed)
    for config in (model.config, model.generation_config):
        config.bos_token_id = None
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_additions(path: Path, num: int) -> Path:
    """Write a jsonl of distinct tasks `t00`, `t01`, … with a question and an answer."""
    rows = ({"id": f"t{n:02d}", "question": f"{n}+{n}=", "answer": str(2 * n)} for n in range(num))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def small_run(folder: Path, *, num_tasks: int = 40, **sections: Mapping[str, Any]) -> dict[str, Any]:
    """Configuration of a run of seconds in `folder`, whose `model` and `tasks.jsonl` are made where they are missing.

    Args:
        folder: Of everything; the run is `folder/runs/small`.
        num_tasks: Rows of `tasks.jsonl`.
        sections: Sections or top-level keys that replace or extend what is here; a mapping extends, None takes a
            key out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        save_tiny_policy(folder / "model")
    if not (folder / "tasks.jsonl").exists():
        save_additions(folder / "tasks.jsonl", num_tasks)
    config: dict[str, Any] = {
        "name": "small",
        "runs_dir": str(folder / "runs"),
        "model": {"path": str(folder / "model")},
        "tasks": {"use": "jsonl", "path": str(folder / "tasks.jsonl"), "reward": "last_number", "order": "sequential"},
        "algorithm": {"use": "grpo", "group_size": 2},
        "explorer": {"max_tokens": 8},
        "trainer": {"steps": 3, "tasks_per_step": 4, "learning_rate": 1e-3},
        "monitor": {"sinks": ["jsonl"], "curve": False},
    }
    for name, section in sections.items():
        if section is None:
            del config[name]
        elif isinstance(section, Mapping) and isinstance(config.get(name), dict):
            merged = {**config[name], **section}
            config[name] = {key: value for key, value in merged.items() if value is not None}
        else:
            config[name] = section
    return config


def save_run_file(config: Mapping[str, Any], path: Path) -> Path:
    """Write a configuration as a run file."""
    import yaml

    path.write_text(yaml.safe_dump(dict(config), sort_keys=False))
    return path
