"""Choose the decoder and the dtype for a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from triune.explorer.engines._batcher import Batcher
from triune.explorer.engines._decoder import Decoder
from triune.explorer.engines._fast import FastDecoder
from triune.explorer.engines._generic import CachedDecoder, RecomputeDecoder, keeps_plain_cache
from triune.explorer.engines._layout import why_generic
from triune.models import has_fast_bfloat16, resolve_model

if TYPE_CHECKING:
    from triune.explorer.engines.embedded import Embedded


def read_model(model: str | Path | Any, tokenizer: Any, trust_remote_code: bool) -> tuple[Any, tuple[int, ...]]:
    """The config, and every id that ends an answer: of config, generation config and tokenizer."""
    from transformers import AutoConfig

    found: list[Any] = [getattr(tokenizer, "eos_token_id", None)]
    config = model
    if isinstance(model, str | Path):
        source = resolve_model(model)
        gguf = {"gguf_file": source.gguf_file} if source.gguf_file else {}
        config = AutoConfig.from_pretrained(source.location, trust_remote_code=trust_remote_code, **gguf)
        file = Path(source.location) / "generation_config.json"
        if file.exists():
            found.append(json.loads(file.read_text()).get("eos_token_id"))
    found.append(getattr(config, "eos_token_id", None))
    eos: set[int] = set()
    for some in found:
        eos.update(some if isinstance(some, list | tuple) else () if some is None else (some,))
    return config, tuple(sorted(eos))


def build_batcher(config: Any, settings: Embedded, decode: Callable[[list[int]], str], keep_kv: bool) -> Batcher:
    """Decoder and scheduler as the settings say."""
    text = config.get_text_config(decoder=True)
    positions = getattr(text, "max_position_embeddings", None) or 1 << 20
    max_context = min(settings.max_context or positions, positions)
    kind = settings.device if settings.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    decoder = build_decoder(config, settings.dtype, torch.device(kind), max_context, settings.fast_path == "auto")
    return Batcher(
        decoder,
        slots=settings.slots,
        kv_bytes=settings.kv_bytes,
        vocab=text.vocab_size,
        max_context=max_context,
        decode=decode,
        keep_kv=keep_kv,
    )


def build_decoder(config: Any, dtype: str, device: torch.device, max_context: int, use_fast: bool) -> Decoder:
    """The fastest decoder that gives this model's answers; its weights are random or absent until a swap."""
    computed = choose_dtype(dtype, config, device)
    if use_fast and not why_generic(config):
        return FastDecoder(config, dtype=computed, device=device, max_context=max_context)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=computed)
    kind = CachedDecoder if keeps_plain_cache(config) else RecomputeDecoder
    return kind(model, device=device)


def choose_dtype(wanted: str, config: Any, device: torch.device) -> torch.dtype:
    """What to compute in; float16 models compute in float32 on a CPU, where float16 is emulated."""
    if wanted != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[wanted]
    own = getattr(config, "dtype", None) or torch.float32
    if device.type != "cpu":
        return torch.bfloat16 if own == torch.float16 else own
    return torch.bfloat16 if own == torch.bfloat16 and has_fast_bfloat16() else torch.float32
