"""A plain Llama-like forward of canonical tensors: what the packed weights are held against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear, rms_norm, silu

from triune.explorer.engines._attention import attend
from triune.explorer.engines._layout import Layout

if TYPE_CHECKING:
    from torch import Tensor


def reference_logprobs(tensors: Mapping[str, Tensor], layout: Layout, turn_TD: Tensor, ids_T: Tensor) -> Tensor:
    """float32[T - 1]: log p(ids[t] | ids[:t]) for t ≥ 1 in float32, from the tensors as they were received.

    It shares nothing with `FastWeights` but the table of rotations, so a weight that was packed wrongly, or not at
    all, shows.
    """
    device = turn_TD.device
    turn_TD = turn_TD[: len(ids_T)]

    def get(name: str) -> Tensor:
        return tensors[name].to(device=device, dtype=torch.float32)

    def project(prefix: str, x: Tensor) -> Tensor:
        bias = f"{prefix}.bias"
        return linear(x, get(f"{prefix}.weight"), get(bias) if bias in tensors else None)

    def norm(name: str, x: Tensor) -> Tensor:
        return rms_norm(x, (x.shape[-1],), get(name), layout.eps)

    def rotate(heads: Tensor) -> Tensor:
        pairs = torch.complex(*heads.chunk(2, dim=-1)) * turn_TD
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    x = tensors["model.embed_tokens.weight"][ids_T.to(tensors["model.embed_tokens.weight"].device)].to(device).float()
    for number in range(layout.num_layers):
        prefix = f"model.layers.{number}"
        h = norm(f"{prefix}.input_layernorm.weight", x)
        q, k, v = (
            project(f"{prefix}.self_attn.{name}_proj", h).unflatten(-1, (-1, layout.head_dim)).transpose(0, 1)
            for name in "qkv"
        )
        if f"{prefix}.self_attn.q_norm.weight" in tensors:
            q, k = norm(f"{prefix}.self_attn.q_norm.weight", q), norm(f"{prefix}.self_attn.k_norm.weight", k)
        k, v = (part.repeat_interleave(layout.group, dim=0) for part in (rotate(k), v))
        o = attend(rotate(q)[None], k[None], v[None], is_causal=True)[0]
        x = x + project(f"{prefix}.self_attn.o_proj", o.transpose(0, 1).flatten(1))
        h = norm(f"{prefix}.post_attention_layernorm.weight", x)
        h = silu(project(f"{prefix}.mlp.gate_proj", h)) * project(f"{prefix}.mlp.up_proj", h)
        x = x + project(f"{prefix}.mlp.down_proj", h)
    head = "model.embed_tokens.weight" if layout.is_tied else "lm_head.weight"
    logits = linear(norm("model.norm.weight", x[:-1]), get(head))
    return logits.log_softmax(-1).gather(1, ids_T[1:, None].to(device))[:, 0]
