"""A 64-bit fingerprint of a set of weights, over every byte, on the device where they lie.

At small learning rates most bytes of a bf16 model do not change in a step, so a hash over samples of them would call
two versions equal. Cryptographic hashes read all bytes but take 1–2 ms per megabyte-sized model and need the CPU; this
one is a multilinear sum in wrap-around int64 arithmetic, so it runs at memory speed on any device and is exact in any
order of summation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1 << 15  # words that share one table of multipliers; fits the second-level cache
_THREADED = 1 << 21  # words from which on several threads are worth starting
_STEP = 0x9E3779B97F4A7C15  # odd, so that its powers never repeat within a model
_MASK = (1 << 64) - 1


def weight_digest(tensors: Mapping[str, Tensor]) -> str:
    """Hash names, dtypes, shapes and all bytes of a canonical state, names sorted.

    The two sides of a weight channel compare it: the trainer hashes what it published, the engine what it received.
    Every word w at position i adds `w * a[i] + (w >> 32) * b[i]` with fixed random odd multipliers, so one changed
    bit always changes the digest and random changes collide with a chance of about 2**-48.

    Args:
        tensors: Name → tensor of any dtype; layout does not matter, values are read row by row.

    Returns:
        16 hexadecimal digits.
    """
    import torch

    header = hashlib.blake2b(digest_size=8)
    pieces: list[_Piece] = []
    place = 0
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        header.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        if tensor.numel():
            words = _words(tensor)
            pieces += _cut(words, place)
            place += words.numel()
    threads = torch.get_num_threads() if place > _THREADED and pieces[0].words.is_cpu else 1
    if threads == 1:
        sums = map(_sum, pieces)
    else:
        with ThreadPoolExecutor(threads) as pool:
            sums = pool.map(_sum_all, [pieces[first::threads] for first in range(threads)])
    return f"{_finish(sum(sums) & _MASK ^ int.from_bytes(header.digest(), 'little')):016x}"


class _Piece(NamedTuple):
    """Words that lie in one block of places: the first one's place in it, and the block's own factor."""

    words: Tensor
    first: int
    factor: int


def _words(tensor: Tensor) -> Tensor:
    """int64[W]: the bytes row by row, zeros behind them up to a whole word; a view where that is possible."""
    import torch

    data = tensor.contiguous().view(-1).view(torch.uint8)
    rest = -data.numel() % 8
    if rest or data.storage_offset() % 8:
        padded = data.new_zeros(data.numel() + rest)
        padded[: data.numel()] = data
        data = padded
    return data.view(torch.int64)


def _cut(words: Tensor, place: int) -> Iterator[_Piece]:
    """Cut a tensor's words, of which the first one has this place among all, where blocks end."""
    taken = 0
    while taken < words.numel():
        block, first = divmod(place + taken, _BLOCK)
        size = min(_BLOCK - first, words.numel() - taken)
        yield _Piece(words[taken : taken + size], first, pow(_STEP, block, 1 << 64))
        taken += size


def _sum_all(pieces: Sequence[_Piece]) -> int:
    return sum(map(_sum, pieces))


def _sum(piece: _Piece) -> int:
    """The piece's share of the sum."""
    import torch

    words = piece.words
    low, high = (table[piece.first : piece.first + words.numel()] for table in _multipliers(str(words.device)))
    if words.is_cpu:  # one pass each, without intermediate products; a GPU has no such kernel for integers
        mixed = int(torch.dot(words, low)) + int(torch.dot(words >> 32, high))
    else:
        mixed = int((words * low).add_((words >> 32).mul_(high)).sum())
    return piece.factor * (mixed & _MASK) & _MASK


@cache
def _multipliers(device: str) -> tuple[Tensor, Tensor]:
    """Two tables of fixed odd numbers, the same on every machine."""
    import numpy as np
    import torch

    table = np.random.Philox(key=20240203).random_raw(2 * _BLOCK).view(np.int64) | 1
    both = torch.from_numpy(table).to(device)
    return both[:_BLOCK], both[_BLOCK:]


def _finish(value: int) -> int:
    """Spread every bit over all 64 (the finaliser of MurmurHash3, a bijection)."""
    value = (value ^ value >> 33) * 0xFF51AFD7ED558CCD & _MASK
    value = (value ^ value >> 33) * 0xC4CEB9FE1A85EC53 & _MASK
    return value ^ value >> 33
