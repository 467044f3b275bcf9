"""Choose the decoder and the dtype for a model."""

from __future__ import annotations

from typing import Any

import torch

from triune.explorer.engines._decoder import Decoder
from triune.explorer.engines._fast import FastDecoder
from triune.explorer.engines._generic import CachedDecoder, RecomputeDecoder, keeps_plain_cache
from triune.explorer.engines._layout import why_generic
from triune.explorer.engines._linear import has_fast_bfloat16


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
