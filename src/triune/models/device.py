"""Which device computes, and with how many threads."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any


def default_device() -> str:
    """`cuda` where torch sees a GPU, else `cpu`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def set_threads(share: float) -> None:
    """Give torch this share of the cores this process may use; `OMP_NUM_THREADS`, where set, stands above it.

    Args:
        share: 1 for a process that computes alone, less where several share the host: together they never ask for
            more threads than there are cores.
    """
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, int(cores * share)))


def has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies bf16 in hardware; without, bf16 is emulated and several times slower than fp32."""
    import torch

    return bool(torch.backends.mkldnn.is_available() and torch.cpu._is_avx512_bf16_supported())


def set_float32_matmul(precision: str) -> None:
    """Set what float32 products on a CPU compute in, for the whole process.

    A CPU that only emulates bfloat16 keeps full float32 whatever is asked: products are as fast there, and under
    `medium` torch's fused attention takes twelve times as long.

    Args:
        precision: `medium`, `high` or `highest`, as in `torch.set_float32_matmul_precision`.
    """
    import torch

    torch.set_float32_matmul_precision(precision if has_fast_bfloat16() else "highest")


def return_freed_memory() -> None:
    """Give the system back what was freed.

    The C library keeps the pieces of freed activations, into which the next large tensor does not fit: with a model of
    135M parameters a process would hold a quarter more. Takes about 0.05 s per freed gigabyte, so it does not pay for
    small models. Does nothing where the C library has no `malloc_trim`.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
