"""Attention over short rows on a CPU, forward and backward, as plain matrix products.

The fused kernel of torch is built for long sequences: at 13 to 128 tokens a row it takes 4 to 15 times as long as
batched products, and with bfloat16 inputs these in turn are three times slower than in float32. So rows of up to a few
hundred tokens are computed here in float32 (at the process's matmul precision), the query heads that share a key head
folded into one product, in blocks of queries that skip the keys after them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LONGEST = 1024
"""Tokens of a row from which on the fused kernel is faster."""

_BLOCK = 128  # queries that are computed at once


def short_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """softmax(scale * query @ key.T + bias) @ value, causal when there is no bias.

    Args:
        query: [B, H, T, D].
        key: [B, K, T, D]; each serves H / K query heads.
        value: [B, K, T, D].
        bias: [B or 1, 1, T, T] added to the scores, without gradient.
        scale: Usually D ** -0.5.

    Returns:
        [B, T, H, D] in the dtype of `query`.
    """
    return _Short.apply(query, key, value, bias, scale)


class _Short(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        batch, heads, length, _ = query.shape
        keys, values = _flat(key), _flat(value)
        shape = (batch, key.shape[1], heads // key.shape[1])
        out = query.new_empty(batch, length, heads, value.shape[-1])
        kept = []
        for start in range(0, length, _BLOCK):
            stop = min(start + _BLOCK, length)
            scores = torch.bmm(_fold(query[:, :, start:stop], shape) * scale, keys[:, :stop].transpose(1, 2))
            part = scores.view(*shape, stop - start, stop)
            part += _bias(bias, start, stop, query.device)
            probs = torch.softmax(scores, -1)
            mixed = torch.bmm(probs, values[:, :stop])
            out[:, start:stop] = _unfold(mixed, shape)
            kept.append(probs.to(query.dtype))
        ctx.save_for_backward(query, key, value, out, *kept)
        ctx.scale, ctx.shape = scale, shape
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, *kept = ctx.saved_tensors
        grad, scale, shape = grads[0], ctx.scale, ctx.shape
        keys, values = _flat(key), _flat(value)
        length = query.shape[2]
        key_grad, value_grad = torch.zeros_like(keys), torch.zeros_like(values)
        query_grad = torch.empty_like(query)
        for start, probs in zip(range(0, length, _BLOCK), kept, strict=True):
            stop = min(start + _BLOCK, length)
            probs = probs.float()
            above = _fold(grad[:, start:stop].transpose(1, 2), shape)
            mixed = _fold(out[:, start:stop].transpose(1, 2), shape)
            value_grad[:, :stop].baddbmm_(probs.transpose(1, 2), above)
            slope = torch.bmm(above, values[:, :stop].transpose(1, 2))
            slope.sub_((above * mixed).sum(-1, keepdim=True)).mul_(probs)
            folded = _fold(query[:, :, start:stop], shape)
            key_grad[:, :stop].baddbmm_(slope.transpose(1, 2), folded, alpha=scale)
            moved = torch.bmm(slope, keys[:, :stop]).mul_(scale)
            query_grad[:, :, start:stop] = _unfold(moved, shape).transpose(1, 2)
        return (
            query_grad,
            key_grad.view(key.shape).to(key.dtype),
            value_grad.view(value.shape).to(key.dtype),
            None,
            None,
        )


def _flat(tensor: Tensor) -> Tensor:
    """[B, K, T, D] → float32[B * K, T, D]."""
    return tensor.float().reshape(-1, *tensor.shape[2:])


def _fold(tensor: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """[B, H, T, D] → float32[B * K, H / K * T, D]: the query heads of one key head as more queries."""
    batch, keys, share = shape
    return tensor.float().reshape(batch * keys, share * tensor.shape[2], tensor.shape[3])


def _unfold(tensor: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """[B * K, H / K * T, D] → [B, T, H, D]."""
    batch, keys, share = shape
    return tensor.view(batch, keys * share, -1, tensor.shape[-1]).transpose(1, 2)


def _bias(bias: Tensor | None, start: int, stop: int, device: torch.device) -> Tensor:
    """What is added to a block of scores [B, K, H / K, queries, keys]."""
    if bias is not None:
        return bias[:, :, start:stop, :stop].unsqueeze(2).float()
    future = torch.full((stop - start, stop), torch.finfo(torch.float32).min, device=device)
    return future.triu_(start + 1)
