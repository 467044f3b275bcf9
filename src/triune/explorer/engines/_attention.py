"""Fused attention with products in full float32, whatever the process multiplies linear layers in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """softmax(q @ k.T / sqrt(D) + mask) @ v, in the shapes of `scaled_dot_product_attention`.

    torch's fused kernel for CPUs asks for its small products one by one, and at a reduced matmul precision each costs
    many times its arithmetic: float32 queries of a decoding step take 4 to 14 times as long under `medium`.
    """
    precision = torch.get_float32_matmul_precision()
    if q.dtype != torch.float32 or q.device.type != "cpu" or precision == "highest":
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
    torch.set_float32_matmul_precision("highest")
    try:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
    finally:
        torch.set_float32_matmul_precision(precision)
