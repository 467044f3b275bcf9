"""After a swap: do the weights that would be served answer as the weights that were received?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from triune.errors import StaleWeightsError
from triune.explorer.engines._decoder import Decoder
from triune.explorer.engines._linear import has_fast_bfloat16
from triune.ports import WeightUpdate

if TYPE_CHECKING:
    from torch import Tensor

_TOKENS = 32
_EXACT, _REDUCED = 1e-3, 0.3  # nats, mean over the probe's tokens


def probe_ids(vocab: int, num: int = _TOKENS) -> np.ndarray:
    """int64[num]: the same ids for every model of a vocabulary, spread over it."""
    return (np.arange(1, num + 1, dtype=np.int64) * 7919) % vocab


def check_probe(
    decoder: Decoder, staged: Any, tensors: Mapping[str, Tensor], update: WeightUpdate, *, vocab: int, max_context: int
) -> None:
    """Score fixed tokens by the path that decodes and by a plain forward of what was received.

    The digest says that the right bytes arrived; this says that they were packed right. Bits cannot be compared,
    because the two forwards round differently, and bfloat16 differs by tenths of a nat on tokens this unlikely.

    Raises:
        StaleWeightsError: They differ by more than rounding.
    """
    ids = probe_ids(vocab, min(_TOKENS, max_context))
    gap = float(np.abs(decoder.probe(staged, ids) - decoder.reference(tensors, ids)).mean())
    tolerance = _REDUCED if is_reduced(decoder.dtype) else _EXACT
    if not gap <= tolerance:
        raise StaleWeightsError(
            f"swap to version {update.version}",
            f"the probe's log-probs are {gap:.3g} nats off on average",
            f"at most {tolerance} from a plain forward of the received weights",
            "the served weights are not the received ones, or hold NaN",
        )


def is_reduced(dtype: torch.dtype) -> bool:
    """Whether products are made with fewer bits than float32 has, by dtype or by torch's setting."""
    lowered = torch.get_float32_matmul_precision() != "highest"
    return dtype != torch.float32 or (lowered and (has_fast_bfloat16() or torch.cuda.is_available()))
