"""Settings of the weight synchronisation: how often, how stale, how the swap meets running rollouts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from triune.settings import BrickOf, Settings


class SyncSettings(Settings):
    """Synchronous and asynchronous are two numbers here, not modes."""

    every: int = Field(default=1, ge=1)
    """Publish weights after every so many steps."""

    max_staleness: int = Field(default=0, ge=0)
    """How many versions behind the trainer an experience may be when it is trained on; 0 is strictly on-policy."""

    style: Literal["drain", "inflight"] = "drain"
    """`drain` finishes running rollouts before weights are swapped, `inflight` swaps under them."""

    kv: Literal["recompute", "keep"] = "recompute"
    """After a swap, prefill running sequences again, or keep their old keys and values (off-policy; is measured)."""

    max_stale_retries: int = Field(default=2, ge=0)
    """How often a group that became too stale is tried again before its task is set aside."""

    channel: Annotated[Any, BrickOf("channel")] = Field(default={"use": "memory"})
    """How weights travel: `memory` inside one process, `files` between processes over a folder."""
