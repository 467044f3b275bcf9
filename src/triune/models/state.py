"""The canonical state of a model: what is published, hashed and exported, whatever wraps the model for training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_ADAPTED = ".base_layer."


def canonical_state(model: Any) -> dict[str, Tensor]:
    """Name-sorted tensors under their Hugging Face names, with adapters merged in and tied weights once.

    Full weights are views of the live parameters: whoever keeps them must copy. A weight under an adapter is computed
    here in float32, `W + alpha / r * B @ A`, and rounded to its own dtype. A tied head appears only as the embedding.

    Args:
        model: A Hugging Face causal LM or a `PeftModel` around one.
    """
    import torch

    base, adapted = _base_of(model)
    tied = set(getattr(base, "all_tied_weights_keys", None) or ())
    state: dict[str, Tensor] = {}
    for name, tensor in base.state_dict().items():
        if ".lora_" in name or ".original_module." in name:
            continue
        name = name.replace(".modules_to_save.default.", ".")
        if _ADAPTED in f".{name}":
            module, _, leaf = name.partition(_ADAPTED)
            name = f"{module}.{leaf}"
            if leaf == "weight" and module in adapted:
                with torch.no_grad():
                    delta = adapted[module].get_delta_weight("default")
                    tensor = (tensor.float() + delta.float()).to(tensor.dtype)
        if name not in tied:
            state[name] = tensor.detach()
    return dict(sorted(state.items()))


def _base_of(model: Any) -> tuple[Any, dict[str, Any]]:
    """The Hugging Face model inside, and its adapted layers by name."""
    if not hasattr(model, "peft_config"):
        return model, {}
    base = model.get_base_model()
    return base, {name: layer for name, layer in base.named_modules() if hasattr(layer, "get_delta_weight")}
