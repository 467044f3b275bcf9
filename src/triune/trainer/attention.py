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

NAME = "triune_short"
"""Name under which Transformers finds it."""

LONGEST = 1024
"""Tokens of a row from which on the fused kernel is faster."""

_BLOCK = 128  # queries that are computed at once


class PackedRows:
    """Where the tokens of rows [R, W] are when padding is left out and all rows stand in one, [1, N].

    Everything but attention works token by token, so the model may read one long row without padding; attention lays
    the rows out again.

    Args:
        inside: bool[R, W], False on padding.
        bias: [R or 1, 1, W, W] added to scores; None = causal within each row.
    """

    def __init__(self, inside: Tensor, bias: Tensor | None) -> None:
        self.shape, self.bias = inside.shape, bias
        flat = inside.reshape(-1)
        self.places = flat.nonzero().squeeze(1)
        self.ranks = torch.where(flat, flat.cumsum(0) - 1, 0)
        self.padding = ~flat
        self.num_uses = 0
        """How often an attention layer has used it: 0 after a forward pass means the model does not hand it on."""

    def pack(self, tokens: Tensor) -> Tensor:
        """[R, W] → [1, N]."""
        return tokens.reshape(-1).index_select(0, self.places).unsqueeze(0)

    def spread(self, packed: Tensor) -> Tensor:
        """[1, H, N, D] → [R, H, W, D]; what stands on padding is never looked at."""
        return _Spread.apply(packed, self)

    def gather(self, rows: Tensor) -> Tensor:
        """[R, W, H, D] → [1, N, H, D]."""
        return _Gather.apply(rows, self)


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


def use_short_attention(model: Any) -> bool:
    """Make a Transformers model use it for short rows; False when its attention is of another kind.

    Rows longer than `LONGEST` go to torch's fused kernel as before.
    """
    from transformers import AttentionInterface

    config = model.config
    odd = ("attn_logit_softcapping", "sliding_window", "attention_chunk_size")
    if getattr(config, "_attn_implementation", None) != "sdpa" or any(getattr(config, name, None) for name in odd):
        return False
    AttentionInterface.register(NAME, _attend)
    config._attn_implementation = NAME
    return True


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packed_rows: PackedRows | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """The signature Transformers calls."""
    if packed_rows is not None:
        packed_rows.num_uses += 1
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        rows = [packed_rows.spread(packed) for packed in (query, key, value)]
        return packed_rows.gather(short_attention(*rows, packed_rows.bias, scale)), None
    if query.shape[2] > LONGEST or query.shape[2] != key.shape[2] or query.shape[1] % key.shape[1]:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **more)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return short_attention(query, key, value, attention_mask, scale), None


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


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, rows: PackedRows) -> Tensor:
        ctx.rows = rows
        found = packed[0].index_select(1, rows.ranks)
        return found.view(found.shape[0], *rows.shape, found.shape[2]).transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        heads = grads[0].transpose(0, 1)
        flat = heads.reshape(heads.shape[0], -1, heads.shape[3])
        return flat.index_select(1, ctx.rows.places).unsqueeze(0), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_BTHD: Tensor, rows: PackedRows) -> Tensor:
        ctx.rows = rows
        return rows_BTHD.flatten(0, 1).index_select(0, rows.places).unsqueeze(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        rows: PackedRows = ctx.rows
        found = grads[0][0].index_select(0, rows.ranks)
        found[rows.padding] = 0
        return found.view(*rows.shape, *found.shape[1:]), None


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
