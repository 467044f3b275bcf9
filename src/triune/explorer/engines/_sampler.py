"""Choosing tokens from logits, with the exact log-prob of what was chosen.

The inverse of the cumulative distribution is found in two levels (sums of blocks, then inside one block), because a
cumulative sum over a whole vocabulary costs more than everything else in this file and `torch.multinomial` more still.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 256
_ONE_LEVEL = 2048


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How N rows choose: all arrays have N entries."""

    temperature: np.ndarray
    top_p: np.ndarray
    top_k: np.ndarray
    min_p: np.ndarray
    uniform: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What N rows chose: ids int64[N], log-probs float32[N] in nats; raw is before truncation."""

    tokens: np.ndarray
    logprobs: np.ndarray
    raw_logprobs: np.ndarray


def choose(logits_NV: Tensor, how: Choice) -> Chosen:
    """Choose one token per row.

    Temperature comes first, then `top_k`, `top_p` over what it left, and `min_p` against the likeliest, as in
    Transformers. Temperature 0 takes the likeliest token and reports its log-prob at temperature 1, because a
    point mass has none worth keeping.
    """
    device = logits_NV.device
    logits_NV = logits_NV.float()
    greedy = how.temperature == 0
    scale = np.where(greedy, 1.0, how.temperature).astype(np.float32)
    if (scale != 1.0).any():
        logits_NV = logits_NV / torch.from_numpy(scale).to(device)[:, None]
    peak_N = logits_NV.amax(-1, keepdim=True)
    weights_NV = (logits_NV - peak_N).exp_()
    uniform_N = torch.from_numpy(how.uniform).to(device)
    tokens_N, total_N = _invert(weights_NV, uniform_N)
    tokens_N.clamp_(max=logits_NV.shape[-1] - 1)  # NaN compares with nothing; its log-prob tells the caller
    if greedy.any():
        tokens_N = torch.where(torch.from_numpy(greedy).to(device), logits_NV.argmax(-1), tokens_N)
    chosen_N = logits_NV.gather(1, tokens_N[:, None])[:, 0]
    raw_N = (chosen_N - peak_N[:, 0]).double() - total_N.log()
    tokens, raw = tokens_N.cpu().numpy(), raw_N.float().cpu().numpy()
    cut = ~greedy & ((how.top_p < 1) | (how.top_k > 0) | (how.min_p > 0))
    if not cut.any():
        return Chosen(tokens=tokens, logprobs=raw, raw_logprobs=raw)
    rows = np.flatnonzero(cut)
    weights_KV = weights_NV[torch.from_numpy(rows).to(device)]
    some = _choose_truncated(weights_KV, rows, how)
    logprobs = raw.copy()
    tokens[rows], logprobs[rows], raw[rows] = some.tokens, some.logprobs, some.raw_logprobs
    return Chosen(tokens=tokens, logprobs=logprobs, raw_logprobs=raw)


def _invert(weights_NV: Tensor, uniform_N: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the uniform in the cumulative weights, and the weights' sum; never an index of weight 0."""
    size = weights_NV.shape[-1]
    if size <= _ONE_LEVEL:
        running_NV = weights_NV.cumsum(-1, dtype=torch.float64)
        total_N = running_NV[:, -1]
        return _first_above(running_NV, uniform_N * total_N), total_N
    whole = size // _BLOCK * _BLOCK
    blocks_NC = weights_NV[:, :whole].unflatten(-1, (-1, _BLOCK)).sum(-1).double()
    if whole < size:
        blocks_NC = torch.cat([blocks_NC, weights_NV[:, whole:].sum(-1, keepdim=True).double()], dim=-1)
    running_NC = blocks_NC.cumsum(-1)
    total_N = running_NC[:, -1]
    target_N = uniform_N * total_N
    block_N = _first_above(running_NC, target_N)
    before_N = (running_NC - blocks_NC).gather(1, block_N[:, None])[:, 0]
    columns_NB = block_N[:, None] * _BLOCK + torch.arange(_BLOCK, device=weights_NV.device)
    inside_NB = weights_NV.gather(1, columns_NB.clamp_max(size - 1)).double()
    inside_NB = inside_NB.masked_fill_(columns_NB >= size, 0.0)
    return block_N * _BLOCK + _first_above(inside_NB.cumsum(-1), target_N - before_N), total_N


def _first_above(running_NC: Tensor, target_N: Tensor) -> Tensor:
    """First column whose running sum exceeds the target; where rounding leaves none, the last that adds anything."""
    index_N = torch.searchsorted(running_NC, target_N[:, None], right=True)
    last_N = torch.searchsorted(running_NC, running_NC[:, -1:].contiguous())
    return torch.minimum(index_N, last_N)[:, 0]


def _choose_truncated(weights_KV: Tensor, rows: np.ndarray, how: Choice) -> Chosen:
    """The rows that truncate: choose by rank among the surviving tokens."""
    device = weights_KV.device

    def column(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values[rows]).to(device)[:, None]

    sorted_KV, order_KV = weights_KV.sort(dim=-1, descending=True, stable=True)
    sorted_KV = sorted_KV.double()
    total_K = sorted_KV.sum(-1, keepdim=True)
    rank_V = torch.arange(sorted_KV.shape[-1], device=device)
    top_k_K = column(how.top_k)
    kept_KV = sorted_KV.masked_fill((top_k_K > 0) & (rank_V >= top_k_K), 0.0)
    before_KV = kept_KV.cumsum(-1) - kept_KV
    kept_KV.masked_fill_(before_KV >= column(how.top_p) * kept_KV.sum(-1, keepdim=True), 0.0)
    kept_KV.masked_fill_(sorted_KV < column(how.min_p) * sorted_KV[:, :1], 0.0)
    running_KV = kept_KV.cumsum(-1)
    rank_K = _first_above(running_KV, column(how.uniform)[:, 0] * running_KV[:, -1])[:, None]
    weight_K = sorted_KV.gather(1, rank_K)
    return Chosen(
        tokens=order_KV.gather(1, rank_K)[:, 0].cpu().numpy(),
        logprobs=(weight_K / running_KV[:, -1:]).log()[:, 0].float().cpu().numpy(),
        raw_logprobs=(weight_K / total_K).log()[:, 0].float().cpu().numpy(),
    )


def chosen_logprobs(logits_NV: Tensor, tokens_N: Tensor, temperature: float) -> Tensor:
    """float32[N]: log-prob of given tokens at a temperature, without a normalised copy of the logits."""
    logits_NV = logits_NV.float()
    if temperature != 1.0:
        logits_NV = logits_NV / temperature
    return logits_NV.gather(1, tokens_N[:, None])[:, 0] - logits_NV.logsumexp(-1)
