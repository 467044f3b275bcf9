"""Log-probs of chosen tokens without the logits of all positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 96 << 20
"""Logits (float32) that are made at once."""

KEPT_BYTES = 192 << 20
"""Logits that may be kept from the forward to the backward pass; more are made again there."""


def chosen_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor | None = None, *, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """log softmax(hidden @ weight.T / temperature) at `targets`, and the entropy of that distribution.

    Logits are made in chunks of rows and, beyond `KEPT_BYTES`, made again in the backward pass, so that memory does not
    grow with rows x vocabulary.
    `torch.nn.functional.linear_cross_entropy` knows no temperature or entropy and is not faster on a CPU.

    Args:
        hidden: [M, H] in the dtype matrix products should run in.
        weight: [V, H], any floating dtype; its gradient has that dtype.
        targets: int64[M].
        temperature: float32[M]; None = 1.
        entropy: Also return entropies.

    Returns:
        float32[M] log-probs and, when asked for, float32[M] entropies; both in nats and with gradient.
    """
    inverse = None if temperature is None else temperature.reciprocal().unsqueeze(1)
    keep = torch.is_grad_enabled() and 4 * len(hidden) * len(weight) <= KEPT_BYTES
    logprobs, entropies = _Chosen.apply(hidden, weight, targets, inverse, entropy, keep)
    return logprobs, entropies if entropy else None


def _rows_per_chunk(vocab: int) -> int:
    return max(16, CHUNK_BYTES // (4 * vocab))


class _Chosen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, inverse: Tensor | None, entropy: bool, keep: bool
    ) -> tuple[Tensor, Tensor]:
        count = len(hidden)
        lse, logprobs = hidden.new_empty(count, dtype=torch.float32), hidden.new_empty(count, dtype=torch.float32)
        entropies = hidden.new_zeros(count if entropy else 0, dtype=torch.float32)
        head = weight.to(hidden.dtype)
        kept = []
        for rows in _chunks(count, weight.shape[0]):
            logits = _logits(hidden[rows], head, None if inverse is None else inverse[rows])
            lse[rows] = logits.logsumexp(-1)
            logprobs[rows] = logits.gather(1, targets[rows, None]).squeeze(1) - lse[rows]
            if entropy:
                probs = (logits - lse[rows, None]).exp_()
                entropies[rows] = lse[rows] - probs.mul_(logits).sum(-1)
            if keep:
                kept.append(logits)
        ctx.save_for_backward(hidden, weight, targets, inverse, lse, entropies, *kept)
        ctx.entropy = entropy
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, inverse, lse, entropies, *kept = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        head = weight.to(hidden.dtype)
        hidden_grad = torch.empty_like(hidden) if wants_hidden else None
        weight_grad: Tensor | None = None
        for number, rows in enumerate(_chunks(len(hidden), weight.shape[0])):
            scale = None if inverse is None else inverse[rows]
            logits = kept[number] if kept else _logits(hidden[rows], head, scale)
            slope = _slope(
                logits.sub_(lse[rows, None]),
                targets[rows, None],
                grads[0][rows, None],
                (grads[1][rows, None], entropies[rows, None]) if ctx.entropy else None,
            )
            if scale is not None:
                slope.mul_(scale)
            slope = slope.to(hidden.dtype)
            if hidden_grad is not None:
                torch.mm(slope, head, out=hidden_grad[rows])
            if wants_weight:
                part = slope.t() @ hidden[rows]
                if weight_grad is None:
                    weight_grad = part if rows.stop == len(hidden) else part.float()
                else:
                    weight_grad += part
        return hidden_grad, None if weight_grad is None else weight_grad.to(weight.dtype), None, None, None, None


def _chunks(count: int, vocab: int) -> list[slice]:
    size = _rows_per_chunk(vocab)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _logits(hidden: Tensor, head: Tensor, inverse: Tensor | None) -> Tensor:
    logits = (hidden @ head.t()).float()
    return logits if inverse is None else logits.mul_(inverse)


def _slope(logp: Tensor, targets: Tensor, grad: Tensor, entropy: tuple[Tensor, Tensor] | None) -> Tensor:
    """Gradient with respect to the logits: g (onehot - p) for log-probs, -g p (log p + H) for entropies."""
    if entropy is None:
        slope = logp.exp_().mul_(-grad)
    else:
        grad_h, h = entropy
        probs = logp.exp()
        slope = probs * -(grad + grad_h * (logp + h))
    return slope.scatter_add_(1, targets, grad)
