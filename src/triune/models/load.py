"""Load a causal language model for training: master dtype, adapter, checkpointing, and no dropout anywhere."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from triune.errors import ConfigError
from triune.models.config import LoraSettings, ModelSettings
from triune.models.source import ModelSource, resolve_model

if TYPE_CHECKING:
    import torch

log = logging.getLogger("triune.models")


def load_model(
    settings: ModelSettings, device: str | torch.device = "cpu", *, seed: int = 0, where: str = "model"
) -> Any:
    """Load what `settings` describes, ready to be trained.

    Log-probs of two passes over the same tokens must agree exactly, or ratios are not 1 on an unchanged policy; so
    every dropout is set to 0 (with a log line when a model had some) and the model stays in evaluation mode, except
    that gradient checkpointing needs `train()`.

    Args:
        settings: The section `model` of a run file.
        device: Where the weights go.
        seed: Of the adapter's initial weights.
        where: Dotted key of the settings, for messages.

    Returns:
        A Hugging Face causal LM, or a `PeftModel` around one.

    Raises:
        ConfigError: There is no such model, or a LoRA target is no layer of it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    source = resolve_model(settings.path, f"{where}.path")
    dtype = torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            source.location, dtype=dtype, trust_remote_code=settings.trust_remote_code, **source.arguments()
        )
    except (OSError, ValueError, KeyError) as error:
        text = str(error).strip().splitlines()[0]
        found = f"{settings.path} does not load ({text})"
        raise ConfigError(f"{where}.path", found, "a causal language model") from error
    model = model.to(device)
    if settings.lora is not None or source.adapter is not None:
        model = _add_adapter(model, source, settings.lora, seed)
    switch_off_dropout(model)
    model.eval()
    if settings.gradient_checkpointing:
        _checkpoint_activations(model)
        model.train()
    return model


def _checkpoint_activations(model: Any) -> None:
    """Under the newer of the two names that Transformers has had for it."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _add_adapter(model: Any, source: ModelSource, lora: LoraSettings | None, seed: int) -> Any:
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model

    if source.adapter is not None:
        adapted: Any = PeftModel.from_pretrained(model, source.adapter, is_trainable=True)
        found: Any = adapted.peft_config["default"]
        if lora is not None and (found.r, float(found.lora_alpha)) != (lora.rank, lora.alpha):
            raise ConfigError(
                "model.lora",
                f"rank {lora.rank}, alpha {lora.alpha:g}",
                f"those of {source.adapter}: rank {found.r}, alpha {found.lora_alpha:g}",
                "leave model.lora out",
            )
        _check_adapter(adapted, "model.path", source.adapter)
        return adapted
    assert lora is not None
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    alpha: Any = lora.alpha  # peft says int and takes any number
    config: Any = LoraConfig(
        r=lora.rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    config.base_model_name_or_path = source.name
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            adapted = get_peft_model(model, config)
        except ValueError as error:
            raise ConfigError("model.lora.targets", str(error).splitlines()[0], "names of linear layers") from error
    _check_adapter(adapted, "model.lora.targets", str(targets))
    return adapted


def _check_adapter(adapted: Any, where: str, found: str) -> None:
    """Refuse adapters that the trainer would train otherwise than they are published.

    The trainer multiplies by the head's weight itself, and what is published is `W + alpha / r * B @ A`.

    Raises:
        ConfigError: DoRA, an adapter on or a copy of the head, or one of an embedding that the head shares.
    """
    base, config = adapted.get_base_model(), adapted.peft_config["default"]
    expected, do = "adapters of inner layers", "train the layers named `*_proj`, or all weights"
    if getattr(config, "use_dora", False):
        raise ConfigError(where, f"{found}: DoRA", "plain LoRA", "make the adapter without use_dora")
    if _is_wrapped(base.get_output_embeddings()):
        raise ConfigError(where, f"{found}: the head (lm_head) among them", expected, do)
    if getattr(base.config, "tie_word_embeddings", False) and _is_wrapped(base.get_input_embeddings()):
        raise ConfigError(where, f"{found}: the embedding among them, which is also the head", expected, do)


def _is_wrapped(module: Any) -> bool:
    return hasattr(module, "base_layer") or hasattr(module, "original_module")


def max_positions(settings: ModelSettings) -> int | None:
    """Longest sequence the model was made for; None when its configuration does not say."""
    from transformers import AutoConfig

    source = resolve_model(settings.path)
    gguf = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    config = AutoConfig.from_pretrained(source.location, trust_remote_code=settings.trust_remote_code, **gguf)
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)


def switch_off_dropout(model: Any) -> int:
    """Set every dropout of a model to 0; the number of places that had some.

    Modules (`nn.Dropout`) and the plain numbers that attention layers pass to their kernels (`attention_dropout`).
    """
    import torch

    changed = 0
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p:
            module.p = 0.0
            changed += 1
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float) and value:
                setattr(module, name, 0.0)
                changed += 1
    if changed:
        log.info("dropout was on in %d places of the model and is now off: log-probs must be repeatable", changed)
    return changed
