"""Write a trained model as an ordinary Hugging Face folder that anybody can load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triune.models.state import canonical_state

if TYPE_CHECKING:
    from torch import Tensor


def export_model(
    model: Any,
    folder: str | Path,
    *,
    tokenizer: Any = None,
    state: Mapping[str, Tensor] | None = None,
    dtype: str | None = None,
    source_name: str | None = None,
) -> Path:
    """Save weights, configuration, generation settings, tokenizer and chat template.

    Under LoRA the folder holds the merged model, and `folder/adapter` the adapter alone with the name of its base, so
    that training can go on from either.

    Args:
        model: The trained model (Hugging Face or `PeftModel`).
        folder: Replaced when it exists.
        tokenizer: A Hugging Face tokenizer; its chat template is written with it.
        state: Weights to write instead of the model's own, e.g. of an earlier version.
        dtype: `float32` or `bfloat16`; default the master weights' own, which is exact.
        source_name: What `model.path` said, written into the adapter as the name of its base.

    Returns:
        The folder.
    """
    import torch

    target = Path(folder)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    is_adapted = hasattr(model, "peft_config")
    base = model.get_base_model() if is_adapted else model
    weights = dict(canonical_state(model) if state is None else state)
    if dtype is not None:
        weights = {name: value.to(getattr(torch, dtype)) for name, value in weights.items()}
    _save_weights(base, weights, partial)
    if tokenizer is not None:
        tokenizer.save_pretrained(partial)
    if is_adapted and state is None:
        if source_name is not None:
            model.peft_config["default"].base_model_name_or_path = source_name
        model.save_pretrained(partial / "adapter")
        if tokenizer is not None:
            tokenizer.save_pretrained(partial / "adapter")
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    return target


def _save_weights(base: Any, weights: Mapping[str, Tensor], folder: Path) -> None:
    """`save_pretrained` of Hugging Face knows nothing of merged adapters, so the files are written one by one."""
    from safetensors.torch import save_file

    config = base.config.to_dict()
    config["dtype"] = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    config["architectures"] = [type(base).__name__]
    config.pop("quantization_config", None)
    config.pop("_name_or_path", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True, default=str) + "\n")
    if getattr(base, "generation_config", None) is not None:
        base.generation_config.save_pretrained(folder)
    save_file(
        {name: value.detach().cpu().contiguous() for name, value in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
