"""A 64-bit fingerprint of a set of weights, over every byte, on the device where they lie.

At small learning rates most bytes of a bf16 model do not change in a step, so a hash over samples of them would call
two versions equal. Cryptographic hashes read all bytes but take 1–2 ms per megabyte-sized model and need the CPU; this
one is a multilinear sum in wrap-around int64 arithmetic, so it runs at memory speed on any device and is exact in any
order of summation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1 << 15  # words that share one table of multipliers; fits the second-level cache
_SLAB = 2 * _BLOCK  # words gathered before they are summed
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

    names = sorted(tensors)
    header = hashlib.blake2b(digest_size=8)
    total, block = 0, 1
    slab, filled = None, 0
    for name in names:
        tensor = tensors[name].detach()
        header.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        if not tensor.numel():
            continue
        data = tensor.contiguous().view(-1).view(torch.uint8)
        if slab is None:
            slab = torch.empty(_SLAB * 8, dtype=torch.uint8, device=data.device)
        taken = 0
        while taken < data.numel():
            part = min(data.numel() - taken, slab.numel() - filled)
            slab[filled : filled + part].copy_(data[taken : taken + part])
            taken, filled = taken + part, filled + part
            if filled == slab.numel():
                total, block = _add_blocks(slab, filled, total, block)
                filled = 0
    if slab is not None and filled:
        slab[filled : (filled + 7) // 8 * 8].zero_()
        total, _ = _add_blocks(slab, filled, total, block)
    return f"{_finish(total ^ int.from_bytes(header.digest(), 'little')):016x}"


def _add_blocks(slab: Tensor, filled: int, total: int, block: int) -> tuple[int, int]:
    """Add the slab's blocks to the running sum; returns the sum and the factor of the next block."""
    import torch

    words = slab[: (filled + 7) // 8 * 8].view(torch.int64)
    low, high = _multipliers(str(words.device))
    for part in words.split(_BLOCK):
        size = part.numel()
        if part.is_cpu:  # one pass each, without intermediate products; a GPU has no such kernel for integers
            mixed = int(torch.dot(part, low[:size])) + int(torch.dot(part >> 32, high[:size]))
        else:
            mixed = int((part * low[:size]).add_((part >> 32).mul_(high[:size])).sum())
        total = (total + block * (mixed & _MASK)) & _MASK
        block = block * _STEP & _MASK
    return total, block


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
