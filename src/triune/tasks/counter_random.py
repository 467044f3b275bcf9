"""Random numbers by counter: the n-th number of a seed, without those before it.

SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014) as a hash of a 64-bit
counter. Unlike NumPy's generators, whose streams may change between releases, it gives the same numbers for ever, so
that a resumed run never meets a reshuffled epoch.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(*parts: int | str) -> int:
    """A 64-bit key from names and numbers."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def uniform_bits(key: int, counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """64 random bits for every counter."""
    with np.errstate(over="ignore"):
        z = np.uint64(key) + (counters + np.uint64(1)) * _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def uniform_integers(key: int, counters: NDArray[np.uint64], below: int) -> NDArray[np.int64]:
    """Integers in [0, below); the bias of the remainder is at most below / 2^64."""
    return (uniform_bits(key, counters) % np.uint64(below)).astype(np.int64)


def permuted(positions: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Where a random permutation of [0, size) sends `positions`, without ever storing it.

    A Feistel network of eight rounds permutes the smallest square power of two that holds `size`; what lands outside
    walks on until it lands inside, which keeps it a permutation (Black and Rogaway: Ciphers with arbitrary finite
    domains, 2002). Memory is that of `positions`, whatever the size.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    places = positions.astype(np.uint64)
    outside = np.ones(places.shape, dtype=bool)
    while outside.any():
        left, right = places[outside] >> shift, places[outside] & mask
        for turn in range(8):
            salt = np.uint64(turn) << np.uint64(56)
            left, right = right, left ^ (uniform_bits(key, right | salt) & mask)
        places[outside] = (left << shift) | right
        outside[outside] = places[outside] >= size
    return places.astype(np.int64)
