"""One long row without padding for the model, rows of their own for its attention.

Everything in a transformer but attention works token by token. On a CPU attention lays the rows out again and uses
plain products; on a GPU it uses flash attention with row ends, or, in trees, torch's fused kernel with a mask.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention

from triune.trainer.attention import LONGEST, short_attention

NAME = "triune"
"""Name under which Transformers finds our attention."""


def few_sizes(num: int) -> int:
    """The next larger of 16 sizes per power of two.

    On a CPU a matrix product of a shape that was not seen lately is compiled first, for about half a millisecond: with
    small models that is longer than it computes.
    """
    step = 1 << max(num.bit_length() - 5, 0)
    return -(-num // step) * step


def _widened(inside: Tensor) -> Tensor:
    num, width = inside.shape
    return pad(inside, (0, few_sizes(width) - width, 0, few_sizes(num) - num))


def _widened_bias(bias: Tensor, old: torch.Size, new: torch.Size) -> Tensor:
    """Nobody sees the new columns; the new rows see everything, so that their softmax is finite."""
    more_rows, more_columns = new[0] - old[0], new[1] - old[1]
    if more_columns:
        bias = pad(pad(bias, (0, more_columns), value=torch.finfo(bias.dtype).min), (0, 0, 0, more_columns))
    if more_rows and len(bias) > 1:
        bias = pad(bias, (0, 0, 0, 0, 0, 0, 0, more_rows))
    return bias


def _lengthened(places: Tensor) -> Tensor:
    return torch.cat([places, places[:1].expand(few_sizes(len(places)) - len(places))])


def _ranks(inside: Tensor) -> Tensor:
    flat = inside.reshape(-1)
    return torch.where(flat, flat.cumsum(0) - 1, 0)


class PackedRows:
    """Where the tokens of rows [R, W] are when padding is left out and all rows stand in one, [1, N].

    Everything but attention works token by token, so the model may read one long row without padding; attention lays
    the rows out again.

    On a CPU all sizes are rounded up to few values, see `few_sizes`: copies of the first token stand at the end, and
    attention gets rows and columns of padding. Nothing reads what becomes of them, and no gradient reaches them.

    Args:
        inside: bool[R, W], False on padding.
        bias: [R or 1, 1, W, W] added to scores; None = causal within each row.
    """

    def __init__(self, inside: Tensor, bias: Tensor | None) -> None:
        self.in_row = _ranks(inside)
        """int64[R * W]: place in the packed row, 0 for padding."""
        wide = inside if inside.is_cuda else _widened(inside)
        self.bias = None if bias is None else _widened_bias(bias, inside.shape, wide.shape)
        self.shape, self.ranks, self.padding = wide.shape, _ranks(wide), ~wide.reshape(-1)
        self.places = inside.reshape(-1).nonzero().squeeze(1)
        self.wide_places = wide.reshape(-1).nonzero().squeeze(1)
        self.num = len(self.places)
        if not inside.is_cuda:
            self.places, self.wide_places = _lengthened(self.places), _lengthened(self.wide_places)
        self.num_uses = 0
        """How often an attention layer has used it: 0 after a forward pass means the model does not hand it on."""

    def pack(self, tokens: Tensor) -> Tensor:
        """[R, W] → [1, N]."""
        return tokens.reshape(-1).index_select(0, self.places).unsqueeze(0)

    @cached_property
    def ends(self) -> Tensor:
        """int32[R + 1]: where each row ends in the packed one, 0 first."""
        counts = (~self.padding).view(self.shape).sum(1)
        return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """[1, H, N, D], [1, K, N, D], [1, K, N, D] → [1, N, H, D]."""
        self.num_uses += 1
        if self.bias is None and query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
            return self._attend_varlen(query, key, value, scale)
        query, key, value = self.spread(query), self.spread(key), self.spread(value)
        if not query.is_cuda:
            return self.gather(short_attention(query, key, value, self.bias, scale))
        mixed = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if self.bias is None else self.bias.to(query.dtype),
            is_causal=self.bias is None,
            scale=scale,
            enable_gqa=True,
        )
        return self.gather(mixed.transpose(1, 2))

    def _attend_varlen(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Flash attention that knows where rows end: nothing is laid out again."""
        query, key, value = (one[0].transpose(0, 1) for one in (query, key, value))
        widest = self.shape[1]
        mixed = varlen_attn(
            query, key, value, self.ends, self.ends, widest, widest, scale=scale, window_size=(-1, 0), enable_gqa=True
        )
        assert isinstance(mixed, Tensor)
        return mixed.unsqueeze(0)

    def spread(self, packed: Tensor) -> Tensor:
        """[1, H, N, D] → [R, H, W, D]; what stands on padding is never looked at."""
        return _Spread.apply(packed, self)

    def gather(self, rows: Tensor) -> Tensor:
        """[R, W, H, D] → [1, N, H, D]."""
        return _Gather.apply(rows, self)


def use_packed_attention(model: Any) -> bool:
    """Make a Transformers model use our attention; False when its own is of another kind than full and causal.

    Rows that are not packed go to plain products when they are short and on a CPU, else to torch's kernel as before.
    """
    from transformers import AttentionInterface

    config = model.config
    odd = ("attn_logit_softcapping", "sliding_window", "attention_chunk_size")
    if getattr(config, "_attn_implementation", None) not in ("sdpa", NAME):
        return False
    if any(getattr(config, name, None) for name in odd):
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
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if packed_rows is not None:
        return packed_rows.attend(query, key, value, scale), None
    is_short = query.shape[2] <= LONGEST and query.shape[2] == key.shape[2] and not query.shape[1] % key.shape[1]
    if is_short and not query.is_cuda:
        return short_attention(query, key, value, attention_mask, scale), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    mixed, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scale, **more)
    return mixed, None


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
        found = flat.index_select(1, ctx.rows.wide_places)
        found[:, ctx.rows.num :] = 0
        return found.unsqueeze(0), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_BTHD: Tensor, rows: PackedRows) -> Tensor:
        ctx.rows = rows
        return rows_BTHD.flatten(0, 1).index_select(0, rows.wide_places).unsqueeze(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        rows: PackedRows = ctx.rows
        found = grads[0][0].index_select(0, rows.ranks)
        found[rows.padding] = 0
        return found.view(*rows.shape, *found.shape[1:]), None
