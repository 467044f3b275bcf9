"""Decoding any causal language model through its Hugging Face forward: right first, fast second."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from triune.errors import EngineError, StaleWeightsError
from triune.explorer.engines._sampler import chosen_logprobs

if TYPE_CHECKING:
    from torch import Tensor

_ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_PROBE = np.arange(8, dtype=np.int64)


def keeps_plain_cache(config: Any) -> bool:
    """Whether all layers are attention layers, so that a cache is keys and values and nothing else."""
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ["full_attention"]
    has_attention = any(hasattr(text, name) for name in ("num_attention_heads", "n_head", "num_heads"))
    return has_attention and all(kind in _ATTENTION for kind in kinds)


class _HuggingFaceDecoder:
    """The weights' half: loading, probing and scoring by the model's own forward."""

    keeps_rows = False

    def __init__(self, model: Any, *, device: torch.device) -> None:
        self.model = model.eval().to(device)
        self.device = device
        self.dtype = next(model.parameters()).dtype
        self._takes = frozenset(inspect.signature(model.forward).parameters)
        self.num_rows, self.capacity = 0, 0

    @property
    def bytes_per_position(self) -> int:
        """Cache bytes of one position of one row, from the config's sizes."""
        text = self.model.config.get_text_config(decoder=True)
        heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", 1)
        width = getattr(text, "head_dim", None) or text.hidden_size // getattr(text, "num_attention_heads", 1)
        return 2 * text.num_hidden_layers * heads * width * self.dtype.itemsize

    def stage(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies in the model's dtype; names must be the model's own, tied ones may be missing."""
        own = self.model.state_dict()
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or ())
        missing, unknown = own.keys() - tensors.keys() - tied, tensors.keys() - own.keys()
        if missing or unknown:
            found = f"missing {sorted(missing)[:3]}, unknown {sorted(unknown)[:3]}"
            raise EngineError("swap", found, "the canonical tensors of this model")
        return {
            name: tensor.detach().to(device=self.device, dtype=own[name].dtype, copy=True)
            for name, tensor in tensors.items()
        }

    def probe(self, staged: dict[str, Tensor], ids: np.ndarray) -> np.ndarray:
        """Log-probs of ids[1:] under staged weights."""
        return self._functional(staged, ids)

    def reference(self, tensors: Mapping[str, Tensor], ids: np.ndarray) -> np.ndarray:
        """Log-probs of ids[1:] under the received tensors."""
        own = self.model.state_dict()
        received = {name: tensor.to(device=self.device, dtype=own[name].dtype) for name, tensor in tensors.items()}
        return self._functional(received, ids)

    def _functional(self, weights: Mapping[str, Tensor], ids: np.ndarray) -> np.ndarray:
        tokens = torch.from_numpy(ids.astype(np.int64)).to(self.device)
        call = torch.func.functional_call(self.model, dict(weights), (tokens[None, :-1],), {"use_cache": False})
        return chosen_logprobs(call.logits[0], tokens[1:], 1.0).cpu().numpy()

    def commit(self, staged: dict[str, Tensor]) -> None:
        """Copy the staged weights into the model, and see that it answers as they do."""
        ids = _PROBE % self.model.config.get_text_config(decoder=True).vocab_size
        expected = self._functional(staged, ids)
        self.model.load_state_dict(staged, strict=False)
        if not np.array_equal(self.score(ids, 1.0), expected):
            raise StaleWeightsError("swap", "the model does not answer as the weights it was given")

    def score(self, ids: np.ndarray, temperature: float) -> np.ndarray:
        """Log-probs of ids[1:]."""
        tokens = torch.from_numpy(ids.astype(np.int64)).to(self.device)
        logits = self.model(tokens[None, :-1], use_cache=False).logits[0]
        return chosen_logprobs(logits, tokens[1:], temperature).cpu().numpy()

    def resize(self, num_rows: int, capacity: int) -> None:
        """Remember the bounds; the cache grows by itself."""
        self.num_rows, self.capacity = num_rows, capacity

    def copy(self, source: int, rows: np.ndarray, length: int) -> None:
        """Not used: rows are not kept, prompts are shared inside one prefill."""
        raise AssertionError("rows of this decoder are not kept")

    def extend(self, parts: Sequence[np.ndarray], rows: np.ndarray, starts: Sequence[int]) -> Tensor:
        """Not used either."""
        raise AssertionError("rows of this decoder are not kept")


class CachedDecoder(_HuggingFaceDecoder):
    """Attention models: keys and values of all rows, aligned at the right, so that a step appends one column.

    A row that holds p positions owns the last p columns; what lies left of them is masked away.
    """

    def __init__(self, model: Any, *, device: torch.device) -> None:
        super().__init__(model, device=device)
        self._layers: list[tuple[Tensor, Tensor]] = []

    @property
    def _columns(self) -> int:
        return self._layers[0][0].shape[2] if self._layers else 0

    def _forward(self, ids: Tensor, seen: Tensor, positions: Tensor, past: list[tuple[Tensor, Tensor]]) -> Any:
        from transformers import DynamicCache

        extra: dict[str, Any] = {"position_ids": positions} if "position_ids" in self._takes else {}
        if "logits_to_keep" in self._takes:
            extra["logits_to_keep"] = 1
        cache = "cache" if "cache" in self._takes else "past_key_values"
        extra[cache] = DynamicCache(past) if past else DynamicCache()
        return self.model(ids, attention_mask=seen.long(), use_cache=True, **extra)

    @staticmethod
    def _layers_of(output: Any) -> list[tuple[Tensor, Tensor]]:
        return [(layer.keys, layer.values) for layer in output.past_key_values.layers]

    def prefill(self, prompts: Sequence[np.ndarray], rows: Sequence[np.ndarray]) -> Tensor:
        """Run prompts left-padded, and put their keys and values at the right end of their rows."""
        longest = max(len(prompt) for prompt in prompts)
        ids = np.zeros((len(prompts), longest), dtype=np.int64)
        for number, prompt in enumerate(prompts):
            ids[number, longest - len(prompt) :] = prompt
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        columns = torch.arange(longest, device=self.device)
        seen = columns >= longest - lengths[:, None]
        positions = (columns - (longest - lengths[:, None])).clamp_min(0)
        output = self._forward(torch.from_numpy(ids).to(self.device), seen, positions, [])
        flat = torch.from_numpy(np.concatenate(rows)).to(self.device)
        source = np.repeat(np.arange(len(rows)), [len(some) for some in rows])
        self._merge(self._layers_of(output), flat, torch.from_numpy(source).to(self.device))
        return output.logits[:, -1]

    def _merge(self, new: list[tuple[Tensor, Tensor]], rows: Tensor, source: Tensor) -> None:
        total = max(int(rows.max()) + 1, self._layers[0][0].shape[0] if self._layers else 0)
        columns = max(new[0][0].shape[2], self._columns)

        def join(old: Tensor | None, part: Tensor) -> Tensor:
            joined = part.new_zeros(total, part.shape[1], columns, part.shape[3])
            if old is not None:
                joined[: old.shape[0], :, columns - old.shape[2] :] = old
            joined[rows, :, columns - part.shape[2] :] = part[source]
            return joined

        olds: Sequence[tuple[Tensor | None, Tensor | None]] = self._layers or [(None, None)] * len(new)
        self._layers = [(join(ok, k), join(ov, v)) for (ok, ov), (k, v) in zip(olds, new, strict=True)]

    def move(self, sources: np.ndarray, targets: np.ndarray, length: int) -> None:
        """Put rows into other places."""
        origin, place = (torch.from_numpy(rows).to(self.device) for rows in (sources, targets))
        for pair in self._layers:
            for tensor in pair:
                tensor[place] = tensor[origin]

    def step(self, tokens_N: np.ndarray, positions_N: np.ndarray) -> Tensor:
        """Append a column to the first N rows; rows behind them are forgotten."""
        num = len(tokens_N)
        first = max(0, self._columns - int(positions_N.max()))
        past = [(k[:num, :, first:], v[:num, :, first:]) for k, v in self._layers]
        positions = torch.from_numpy(positions_N).to(self.device)[:, None]
        columns = past[0][0].shape[2]
        seen = torch.arange(columns + 1, device=self.device) >= columns - positions
        output = self._forward(torch.from_numpy(tokens_N).to(self.device)[:, None], seen, positions, past)
        self._layers = self._layers_of(output)
        return output.logits[:, -1]


class RecomputeDecoder(_HuggingFaceDecoder):
    """Models whose state is no plain cache (recurrent, hybrid): every step runs the whole sequences again.

    Sequences are padded at the right, where a causal model does not look.
    """

    def __init__(self, model: Any, *, device: torch.device) -> None:
        super().__init__(model, device=device)
        self._ids = np.zeros((0, 0), dtype=np.int64)

    def resize(self, num_rows: int, capacity: int) -> None:
        """Room for ids."""
        super().resize(num_rows, capacity)
        grown = np.zeros((num_rows, capacity), dtype=np.int64)
        rows, columns = min(num_rows, self._ids.shape[0]), min(capacity, self._ids.shape[1])
        grown[:rows, :columns] = self._ids[:rows, :columns]
        self._ids = grown

    def _logits(self, ids: np.ndarray, last: np.ndarray) -> Tensor:
        logits = self.model(torch.from_numpy(ids).to(self.device), use_cache=False).logits
        return logits[torch.arange(len(ids), device=self.device), torch.from_numpy(last).to(self.device)]

    def prefill(self, prompts: Sequence[np.ndarray], rows: Sequence[np.ndarray]) -> Tensor:
        """Remember the prompts and run them."""
        lengths = np.array([len(prompt) for prompt in prompts])
        ids = np.zeros((len(prompts), lengths.max()), dtype=np.int64)
        for number, prompt in enumerate(prompts):
            ids[number, : len(prompt)] = prompt
            self._ids[rows[number], : len(prompt)] = prompt
        return self._logits(ids, lengths - 1)

    def move(self, sources: np.ndarray, targets: np.ndarray, length: int) -> None:
        """Put rows into other places."""
        self._ids[targets] = self._ids[sources]

    def step(self, tokens_N: np.ndarray, positions_N: np.ndarray) -> Tensor:
        """Append one id per row and run all of them."""
        num = len(tokens_N)
        self._ids[np.arange(num), positions_N] = tokens_N
        return self._logits(self._ids[:num, : int(positions_N.max()) + 1], positions_N)
