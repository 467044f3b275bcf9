"""What an engine's scheduler needs of a model: rows of a cache that are filled, stepped, moved and scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Decoder(Protocol):
    """A model and its key-value cache: row r holds one sequence. All methods run on the lane.

    Two implementations: `FastDecoder` for Llama-like models, `GenericDecoder` for any causal LM.
    """

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        ...

    @property
    def bytes_per_position(self) -> int:
        """Cache bytes of one position of one row."""
        ...

    @property
    def num_rows(self) -> int:
        """Rows allocated."""
        ...

    @property
    def capacity(self) -> int:
        """Positions allocated per row."""
        ...

    @property
    def keeps_rows(self) -> bool:
        """Whether the cache of a row that is stepped over without being used stays what it was."""
        ...

    def stage(self, tensors: Mapping[str, Tensor]) -> Any:
        """Copy new weights next to the old ones; nothing serves them yet."""
        ...

    def probe(self, staged: Any, ids: np.ndarray) -> np.ndarray:
        """float32[T - 1]: log-probs of ids[1:] under staged weights, by the path that decodes."""
        ...

    def reference(self, tensors: Mapping[str, Tensor], ids: np.ndarray) -> np.ndarray:
        """The same by a plain forward of the received tensors."""
        ...

    def commit(self, staged: Any) -> None:
        """Serve the staged weights from now on; what the cache holds is of the old ones."""
        ...

    def resize(self, num_rows: int, capacity: int) -> None:
        """Allocate so many rows and positions; what fits is kept."""
        ...

    def prefill(self, prompts: Sequence[np.ndarray], rows: Sequence[np.ndarray]) -> Tensor:
        """Run prompt i once, put its cache into all of rows[i]; logits [n, V] after the last tokens."""
        ...

    def extend(self, parts: Sequence[np.ndarray], rows: np.ndarray, starts: Sequence[int]) -> Tensor:
        """Append parts[i] behind the first starts[i] positions of rows[i]; logits [n, V]. Only where rows are kept."""
        ...

    def step(self, tokens_N: np.ndarray, positions_N: np.ndarray) -> Tensor:
        """Append token i at position i of row i, for the first N rows; logits [N, V]."""
        ...

    def copy(self, source: int, rows: np.ndarray, length: int) -> None:
        """Give rows the first positions of another row."""
        ...

    def move(self, sources: np.ndarray, targets: np.ndarray, length: int) -> None:
        """Put rows into other places; the old places may be overwritten."""
        ...

    def score(self, ids: np.ndarray, temperature: float) -> np.ndarray:
        """float32[T - 1]: log-probs of ids[1:], without touching the cache."""
        ...
