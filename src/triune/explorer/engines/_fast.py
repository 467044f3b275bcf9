"""Decoding a Llama-like model: one cache tensor, fused projections, no Python per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from triune.explorer.engines._attention import attend
from triune.explorer.engines._fast_weights import FastWeights
from triune.explorer.engines._layout import read_layout, rotations
from triune.explorer.engines._reference import reference_logprobs
from triune.explorer.engines._sampler import chosen_logprobs

if TYPE_CHECKING:
    from torch import Tensor

_PREFILL_TOKENS = 4096  # of one forward, padding included; bounds its activations
_PADDING = 1.25  # a forward's padded size over its real one, at most
_SMALL = 256  # padded tokens of a forward below which another forward would cost more than the padding
_HEAD_ROWS = 512  # positions whose logits exist at the same time when scoring


class FastDecoder:
    """Weights and cache of one model.

    The cache is one tensor [layers, rows, positions, keys | values]: a row can be moved by one copy, one index write
    per layer stores a step's keys and values, and attention reads views of it. Query heads that share a key head are
    folded into the query length, so no key is ever repeated.
    """

    def __init__(self, config: Any, *, dtype: torch.dtype, device: torch.device, max_context: int) -> None:
        self.layout = read_layout(config)
        self.dtype, self.device = dtype, device
        self._turns = rotations(config, self.layout, max_context, device)
        self._weights: FastWeights | None = None
        self._hold(self._allocate(0, 0))

    def _hold(self, cache: Tensor) -> None:
        """Keep a cache, and a view of each layer with one line per position of every row."""
        self._cache = cache
        self._lines = list(cache.flatten(1, 2).unbind(0))

    def _allocate(self, num_rows: int, capacity: int) -> Tensor:
        size = (self.layout.num_layers, num_rows, capacity, self.layout.kv_width)
        return torch.zeros(size, dtype=self.dtype, device=self.device)

    @property
    def bytes_per_position(self) -> int:
        """Cache bytes of one position of one row."""
        return self.layout.num_layers * self.layout.kv_width * self.dtype.itemsize

    @property
    def num_rows(self) -> int:
        """Rows allocated."""
        return self._cache.shape[1]

    @property
    def capacity(self) -> int:
        """Positions allocated per row."""
        return self._cache.shape[2]

    @property
    def keeps_rows(self) -> bool:
        """True: a step writes behind what a row holds."""
        return True

    # ---- weights

    def stage(self, tensors: Mapping[str, Tensor]) -> FastWeights:
        """Copy, fuse and pack new weights."""
        return FastWeights(tensors, self.layout, self.dtype, self.device)

    def probe(self, staged: FastWeights, ids: np.ndarray) -> np.ndarray:
        """Log-probs of ids[1:] under staged weights."""
        return self._score(staged, ids, 1.0)

    def reference(self, tensors: Mapping[str, Tensor], ids: np.ndarray) -> np.ndarray:
        """The same in float32 from the received tensors."""
        return reference_logprobs(tensors, self.layout, self._turns, torch.from_numpy(ids).long()).cpu().numpy()

    def commit(self, staged: FastWeights) -> None:
        """Serve the staged weights from now on."""
        self._weights = staged

    # ---- cache

    def resize(self, num_rows: int, capacity: int) -> None:
        """Allocate so many rows and positions; what fits is kept."""
        old = self._cache
        rows, positions = min(num_rows, old.shape[1]), min(capacity, old.shape[2])
        self._hold(self._allocate(num_rows, capacity))
        if rows and positions:
            self._cache[:, :rows, :positions] = old[:, :rows, :positions]

    def copy(self, source: int, rows: np.ndarray, length: int) -> None:
        """Give rows the first positions of another row."""
        targets = torch.from_numpy(rows).to(self.device)
        self._cache[:, targets, :length] = self._cache[:, source : source + 1, :length]

    def move(self, sources: np.ndarray, targets: np.ndarray, length: int) -> None:
        """Put rows into other places."""
        held = self._cache[:, torch.from_numpy(sources).to(self.device), :length]
        self._cache[:, torch.from_numpy(targets).to(self.device), :length] = held

    # ---- forward

    def prefill(self, prompts: Sequence[np.ndarray], rows: Sequence[np.ndarray]) -> Tensor:
        """Run each prompt once, the longest first, in forwards of similar lengths."""
        lengths = np.array([len(prompt) for prompt in prompts])
        order = np.argsort(-lengths, kind="stable")
        logits = torch.empty(len(prompts), self.layout.vocab, dtype=self.dtype, device=self.device)
        for part in _similar(order, lengths):
            chosen = torch.from_numpy(part).to(self.device)
            logits[chosen] = self._prefill_part([prompts[i] for i in part], [rows[i] for i in part])
        return logits

    def _prefill_part(self, prompts: list[np.ndarray], rows: list[np.ndarray]) -> Tensor:
        assert self._weights is not None
        weights, layout = self._weights, self.layout
        num, longest = len(prompts), len(prompts[0])
        padded = np.zeros((num, longest), dtype=np.int64)
        for number, prompt in enumerate(prompts):
            padded[number, : len(prompt)] = prompt
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        write = _Fill(rows, self.device)
        x = weights.embedding[torch.from_numpy(padded).to(self.device).view(-1)]
        turns = self._turns[:longest].repeat(num, 1)[:, None]
        last = torch.arange(num, device=self.device) * longest + lengths - 1
        for number, layer in enumerate(weights.layers):
            qkv = weights.project(layer, x, turns)
            write(self._cache[number], qkv[:, -layout.kv_width :].view(num, longest, layout.kv_width))
            heads = qkv.view(num, longest, -1, layout.head_dim).transpose(1, 2)
            q, k, v = heads.split([layout.heads, layout.kv_heads, layout.kv_heads], dim=1)
            k, v = (part.repeat_interleave(layout.group, dim=1) for part in (k, v))
            attended = attend(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape[0], -1)
            if number == layout.num_layers - 1:
                x, attended = x[last], attended[last]  # only the last tokens' logits are wanted
            x = weights.finish_layer(layer, x, attended)
        return weights.logits(x)

    def extend(self, parts: Sequence[np.ndarray], rows: np.ndarray, starts: Sequence[int]) -> Tensor:
        """Append tokens behind the first positions of rows: one forward, attention row by row."""
        assert self._weights is not None
        weights = self._weights
        ids = torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(self.device)
        x = weights.embedding[ids]
        sizes = [len(part) for part in parts]
        spans = list(zip(rows.tolist(), starts, sizes, strict=True))
        turns = torch.cat([self._turns[start : start + size] for start, size in zip(starts, sizes, strict=True)])
        turns = turns[:, None]
        for number, layer in enumerate(weights.layers):
            qkv = weights.project(layer, x, turns)
            pieces = zip(qkv.split(sizes), spans, strict=True)
            attended = torch.cat([self._attend_row(number, piece, *span) for piece, span in pieces])
            x = weights.finish_layer(layer, x, attended)
        last = torch.from_numpy(np.cumsum(sizes) - 1).to(self.device)
        return weights.logits(x[last])

    def _attend_row(self, layer: int, qkv: Tensor, row: int, start: int, size: int) -> Tensor:
        """[size, heads x D]: store the new keys and values of a row, and attend to all it has."""
        layout, end = self.layout, start + size
        self._cache[layer, row, start:end] = qkv[:, -layout.kv_width :]
        q = qkv[:, : layout.heads * layout.head_dim].view(size, layout.kv_heads, layout.group, layout.head_dim)
        q = q.permute(1, 2, 0, 3).reshape(1, layout.kv_heads, layout.group * size, layout.head_dim)
        places = torch.arange(end, device=self.device)
        seen = (places <= places[start:, None]).repeat(layout.group, 1)
        k, v = self._keys_values(layer, row, row + 1, end)
        attended = attend(q, k, v, mask=seen)
        return attended.view(layout.heads, size, layout.head_dim).transpose(0, 1).reshape(size, -1)

    def step(self, tokens_N: np.ndarray, positions_N: np.ndarray) -> Tensor:
        """Append one token to each of the first N rows."""
        assert self._weights is not None
        weights, layout = self._weights, self.layout
        num, end = len(tokens_N), int(positions_N.max()) + 1
        positions = torch.from_numpy(positions_N).to(self.device)
        x = weights.embedding[torch.from_numpy(tokens_N).to(self.device)]
        turns = self._turns[positions][:, None]
        slots = positions + torch.arange(num, device=self.device) * self.capacity
        mask = None
        if int(positions_N.min()) + 1 < end:
            unseen = torch.arange(end, device=self.device) > positions[:, None]
            mask = torch.zeros(num, end, dtype=self.dtype, device=self.device).masked_fill_(unseen, float("-inf"))
            mask = mask[:, None, None]
        queries = layout.heads * layout.head_dim
        for number, layer in enumerate(weights.layers):
            qkv = weights.project(layer, x, turns)
            self._lines[number].index_copy_(0, slots, qkv[:, queries:])
            q = qkv[:, :queries].view(num, layout.kv_heads, layout.group, layout.head_dim)
            k, v = self._keys_values(number, 0, num, end)
            attended = attend(q, k, v, mask=mask)
            x = weights.finish_layer(layer, x, attended.reshape(num, queries))
        return weights.logits(x)

    def _keys_values(self, layer: int, first: int, last: int, end: int) -> tuple[Tensor, Tensor]:
        """Views [rows, kv_heads, positions, D] of the cache, one call each: small steps are made of calls."""
        layout, (of_layer, of_row, of_position, _) = self.layout, self._cache.stride()
        size = (last - first, layout.kv_heads, end, layout.head_dim)
        stride = (of_row, layout.head_dim, of_position, 1)
        keys = layer * of_layer + first * of_row
        values = keys + layout.kv_width // 2
        return self._cache.as_strided(size, stride, keys), self._cache.as_strided(size, stride, values)

    # ---- scoring

    def score(self, ids: np.ndarray, temperature: float) -> np.ndarray:
        """Log-probs of ids[1:]."""
        assert self._weights is not None
        return self._score(self._weights, ids, temperature)

    def _score(self, weights: FastWeights, ids: np.ndarray, temperature: float) -> np.ndarray:
        layout = self.layout
        tokens = torch.from_numpy(ids.astype(np.int64)).to(self.device)
        x, turns = weights.embedding[tokens[:-1]], self._turns[: len(ids) - 1, None]
        for layer in weights.layers:
            heads = weights.project(layer, x, turns).view(1, len(ids) - 1, -1, layout.head_dim).transpose(1, 2)
            q, k, v = heads.split([layout.heads, layout.kv_heads, layout.kv_heads], dim=1)
            k, v = (part.repeat_interleave(layout.group, dim=1) for part in (k, v))
            attended = attend(q, k, v, is_causal=True)[0].transpose(0, 1).flatten(1)
            x = weights.finish_layer(layer, x, attended)
        parts = [
            chosen_logprobs(weights.logits(part), tokens[1 + first : 1 + first + len(part)], temperature)
            for first, part in zip(range(0, len(x), _HEAD_ROWS), x.split(_HEAD_ROWS), strict=True)
        ]
        return torch.cat(parts).cpu().numpy()


class _Fill:
    """Writes prompt i's keys and values into all of rows[i], layer after layer."""

    def __init__(self, rows: list[np.ndarray], device: torch.device) -> None:
        flat = np.concatenate(rows)
        sizes = {len(some) for some in rows}
        self._each = sizes.pop() if len(sizes) == 1 else 0
        self._first = int(flat[0])
        self._is_range = bool(self._each) and bool((np.diff(flat) == 1).all())
        self._num = len(flat)
        self._rows = torch.from_numpy(flat).to(device)
        self._source = torch.from_numpy(np.repeat(np.arange(len(rows)), [len(some) for some in rows])).to(device)

    def __call__(self, cache: Tensor, new: Tensor) -> None:
        longest = new.shape[1]
        if self._is_range:
            block = cache[self._first : self._first + self._num].unflatten(0, (-1, self._each))
            block[:, :, :longest] = new[:, None]
        else:
            cache[self._rows, :longest] = new[self._source]


def _similar(order: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Cut prompts, sorted longest first, into forwards that waste little on padding."""
    parts: list[np.ndarray] = []
    first, real = 0, 0
    for end, index in enumerate(order):
        size = lengths[order[first]] * (end + 1 - first)
        wasteful = size > _SMALL and size > _PADDING * (real + lengths[index])
        if end > first and (size > _PREFILL_TOKENS or wasteful):
            parts.append(order[first:end])
            first, real = end, 0
        real += lengths[index]
    parts.append(order[first:])
    return parts
