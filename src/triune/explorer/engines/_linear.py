"""Linear layers whose weights were rearranged once for the kernel that will read them thousands of times."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

from triune.models import has_fast_bfloat16

if TYPE_CHECKING:
    from torch import Tensor

_ROWS = 32  # only a hint to the packing; any number of rows can be multiplied

Linear = Callable[["Tensor"], "Tensor"]
"""x[N, in] → y[N, out]."""


def pack_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """A function that multiplies by `weight`, which becomes its own: pass a copy.

    On CPU bf16 goes to oneDNN and fp32 to MKL where this build of torch has them; small batches gain 20–50 %.
    fp32 is left to torch where `set_float32_matmul_precision("medium")` makes torch faster than packed fp32.
    """
    if weight.device.type == "cpu":
        if weight.dtype == torch.bfloat16 and has_fast_bfloat16():
            return _pack_onednn(weight, bias)
        if weight.dtype == torch.float32 and torch.backends.mkl.is_available() and not _reduced_is_faster():
            return _pack_mkl(weight, bias)

    def plain(x: Tensor) -> Tensor:
        return linear(x, weight, bias)

    return plain


def _reduced_is_faster() -> bool:
    return has_fast_bfloat16() and torch.get_float32_matmul_precision() != "highest"


def _pack_onednn(weight: Tensor, bias: Tensor | None) -> Linear:
    multiply = torch.ops.mkldnn._linear_pointwise
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)

    def onednn(x: Tensor) -> Tensor:
        return multiply(x, packed, bias, "none", [], "")

    return onednn


def _pack_mkl(weight: Tensor, bias: Tensor | None) -> Linear:
    multiply = torch.ops.mkl._mkl_linear
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, _ROWS)
    shape = weight.new_empty(1).expand(weight.shape)  # of the original only the shape is read, as M is always given

    def mkl(x: Tensor) -> Tensor:
        return multiply(x, packed, shape, bias, x.shape[0])

    return mkl
