"""A copy of a state that nobody changes: what is published instead of the live parameters."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from triune.errors import EngineError
from triune.models import weight_digest
from triune.ports import WeightUpdate

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_ALIGN = 64  # bytes; kernels read aligned rows faster


def snapshot(state: Mapping[str, Tensor], dtype: torch.dtype | None) -> tuple[Mapping[str, Tensor], str, str]:
    """Copy every tensor, floating ones in `dtype`, into one allocation; runs on the lane.

    `.detach().to(same dtype)` would alias what AdamW changes in place, so nothing here is ever a view of `state`.

    Args:
        state: Canonical tensors, views of live parameters.
        dtype: Published dtype; None keeps each tensor's own.

    Returns:
        Read-only mapping, its digest, and the name of its dtype (of the largest tensor).
    """
    import torch

    copies: dict[str, Tensor] = {}
    sources: list[Tensor] = []
    targets: list[Tensor] = []
    sizes = {name: _bytes_of(value, dtype) for name, value in state.items()}
    device = next(iter(state.values())).device
    slab = torch.empty(sum(sizes.values()), dtype=torch.uint8, device=device)
    offset = 0
    for name, value in state.items():
        own = dtype if dtype is not None and value.is_floating_point() else value.dtype
        copy = slab[offset : offset + value.numel() * own.itemsize].view(own).view(value.shape)
        copies[name] = copy
        sources.append(value.detach())
        targets.append(copy)
        offset += sizes[name]
    with torch.no_grad():
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
    largest = max(copies.values(), key=lambda value: value.numel())
    return MappingProxyType(copies), weight_digest(copies), str(largest.dtype).removeprefix("torch.")


def _bytes_of(value: Tensor, dtype: torch.dtype | None) -> int:
    own = dtype if dtype is not None and value.is_floating_point() else value.dtype
    return -(-value.numel() * own.itemsize // _ALIGN) * _ALIGN


def torch_dtype(name: str) -> torch.dtype | None:
    """`float32` or `bfloat16` as torch names it; None for `auto`."""
    import torch

    return None if name == "auto" else getattr(torch, name)


def check_digest(update: WeightUpdate, digest: str) -> None:
    """Raise EngineError when restored weights are not the ones the version was committed with."""
    if digest != update.digest:
        raise EngineError(
            f"version {update.version}",
            f"the checkpoint's weights have digest {digest}",
            f"{update.digest}, published after step {update.step}",
            "resume with the settings (dtype, model) the version was published with",
        )


def gone(update: WeightUpdate, kept: list[int]) -> EngineError:
    """The error for a version that is not there any more."""
    have = ", ".join(map(str, kept)) or "none"
    return EngineError(f"version {update.version}", "is no longer kept", f"one of {have}", "fetch the latest version")
