"""Counter-based random numbers: a token's number depends on its request and position, on nothing else."""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(seeds_N: np.ndarray, positions_N: np.ndarray) -> np.ndarray:
    """float64[N] in [0, 1): number `position` of the stream `seed`.

    Unlike a generator with state, neither the other requests of the batch nor a retry can shift it. The seed is
    mixed once before the counter is added, so that neighbouring seeds do not walk through the same numbers.

    Args:
        seeds_N: uint64[N].
        positions_N: Tokens sampled before this one, int64[N].

    Source: SplitMix64 (Steele, Lea and Flood 2014).
    """
    with np.errstate(over="ignore"):
        state = _mix(seeds_N + _GOLDEN) + (positions_N.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: np.ndarray) -> np.ndarray:
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))
