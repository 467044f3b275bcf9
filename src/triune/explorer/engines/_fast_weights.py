"""Weights of a Llama-like model, rearranged for decoding: fused, packed, and rotary pairs side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import rms_norm, silu

from triune.errors import EngineError
from triune.explorer.engines._layout import Layout
from triune.explorer.engines._linear import Linear, pack_linear

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class FastLayer:
    """One decoder layer; `qkv` gives queries, keys, values in this order."""

    norm_in: Tensor
    norm_mid: Tensor
    norm_q: Tensor | None
    norm_k: Tensor | None
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear


class FastWeights:
    """A copy of canonical tensors in the order the kernels like.

    The keys' and queries' numbers are permuted so that the two that a rotation mixes lie side by side: then the
    rotation is one complex product. A dot product does not notice a permutation of both its sides.
    """

    def __init__(self, tensors: Mapping[str, Tensor], layout: Layout, dtype: torch.dtype, device: Any) -> None:
        self.layout, self.dtype, self.device = layout, dtype, device
        self._tensors = tensors
        self.embedding = self._get("model.embed_tokens.weight").clone()
        self.norm = self._get("model.norm.weight").clone()
        head = self.embedding if layout.is_tied else self._get("lm_head.weight")
        self.head = pack_linear(head, None)
        self.layers = [self._layer(f"model.layers.{number}.") for number in range(layout.num_layers)]
        del self._tensors

    def _get(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise EngineError("swap", f"the weights have no tensor {name!r}", "canonical Hugging Face names")
        return self._tensors[name].detach().to(device=self.device, dtype=self.dtype)

    def _maybe(self, name: str) -> Tensor | None:
        return self._get(name) if name in self._tensors else None

    def _layer(self, prefix: str) -> FastLayer:
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        norm_q, norm_k = self._maybe(f"{attention}q_norm.weight"), self._maybe(f"{attention}k_norm.weight")
        return FastLayer(
            norm_in=self._get(f"{prefix}input_layernorm.weight").clone(),
            norm_mid=self._get(f"{prefix}post_attention_layernorm.weight").clone(),
            norm_q=None if norm_q is None else self._paired(norm_q),
            norm_k=None if norm_k is None else self._paired(norm_k),
            qkv=self._fused(attention, ("q_proj", "k_proj", "v_proj"), num_paired=2),
            out=self._fused(attention, ("o_proj",)),
            gate_up=self._fused(mlp, ("gate_proj", "up_proj")),
            down=self._fused(mlp, ("down_proj",)),
        )

    def _fused(self, prefix: str, names: tuple[str, ...], num_paired: int = 0) -> Linear:
        weights = [self._get(f"{prefix}{name}.weight") for name in names]
        biases = [self._maybe(f"{prefix}{name}.bias") for name in names]
        for number in range(num_paired):
            weights[number] = self._paired(weights[number])
            bias = biases[number]
            biases[number] = None if bias is None else self._paired(bias)
        bias = torch.cat([bias for bias in biases if bias is not None]) if biases[0] is not None else None
        return pack_linear(torch.cat(weights), bias)

    def _paired(self, rows: Tensor) -> Tensor:
        """Order each head's rows 0, D/2, 1, D/2 + 1, …"""
        heads = rows.unflatten(0, (-1, 2, self.layout.head_dim // 2))
        return heads.transpose(1, 2).flatten(0, 2).contiguous()

    def project(self, layer: FastLayer, x_NH: Tensor, turn_N1D: Tensor) -> Tensor:
        """Normed, projected, rotated queries and keys, and values: [N, (heads + 2 kv_heads) x D]."""
        layout = self.layout
        qkv = layer.qkv(rms_norm(x_NH, (layout.hidden,), layer.norm_in, layout.eps))
        num_turned = layout.heads + layout.kv_heads
        turned = qkv[:, : num_turned * layout.head_dim]
        if layer.norm_q is not None:
            heads, size = turned.view(-1, num_turned, layout.head_dim), (layout.head_dim,)
            heads[:, : layout.heads] = rms_norm(heads[:, : layout.heads], size, layer.norm_q, layout.eps)
            heads[:, layout.heads :] = rms_norm(heads[:, layout.heads :], size, layer.norm_k, layout.eps)
        exact = turned.float()  # the same memory when it is float32 already
        torch.view_as_complex(exact.view(-1, num_turned, layout.head_dim // 2, 2)).mul_(turn_N1D)
        if exact is not turned:
            turned.copy_(exact)
        return qkv

    def finish_layer(self, layer: FastLayer, x_NH: Tensor, attended_NH: Tensor) -> Tensor:
        """Add the attention's output, then the MLP's."""
        x_NH = x_NH + layer.out(attended_NH)
        both = layer.gate_up(rms_norm(x_NH, (self.layout.hidden,), layer.norm_mid, self.layout.eps))
        gate, up = both.chunk(2, dim=-1)
        return x_NH.add_(layer.down(silu(gate).mul_(up)))

    def logits(self, x_NH: Tensor) -> Tensor:
        """[N, V] of final hidden states."""
        return self.head(rms_norm(x_NH, (self.layout.hidden,), self.norm, self.layout.eps))
