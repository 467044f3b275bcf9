"""Weights within one process: every version is a copy of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from triune.ports import Lane, WeightUpdate
from triune.registry import brick
from triune.sync.ledger import VersionLedger
from triune.sync.snapshot import check_digest, gone, snapshot, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor


@brick("channel")
@dataclass(frozen=True, kw_only=True)
class Memory:
    """Explorer and trainer share a process; a published version is a copy in memory."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What is published; `auto` is what the engine computes in."""
    keep: int = 1
    """Newest versions that can still be fetched; whoever fetched one holds it as long as it likes."""

    def __call__(
        self, *, ledger: VersionLedger, lane: Lane, folder: Path | None = None, dtype: str = "auto", epoch: int = 0
    ) -> MemoryChannel:
        """Open the channel.

        Args:
            ledger: The buffer.
            lane: Where copies and digests are computed.
            folder: Not needed here.
            dtype: The engine's, used when the brick says `auto`; `auto` again keeps the masters' dtype.
            epoch: Incarnation of the run.
        """
        chosen = dtype if self.dtype == "auto" else self.dtype
        return MemoryChannel(ledger, lane, dtype=chosen, keep=self.keep, epoch=epoch)


class MemoryChannel:
    """Implements `WeightChannel` with copies, so that generation never reads half-updated weights.

    A copy is as large as the model, so it is freed as soon as the engine has its own, and room is made before the next.
    """

    def __init__(self, ledger: VersionLedger, lane: Lane, *, dtype: str, keep: int, epoch: int) -> None:
        self._ledger, self._lane, self._dtype = ledger, lane, torch_dtype(dtype)
        self._keep, self._epoch = max(keep, 1), epoch
        self._kept: dict[int, Mapping[str, Tensor]] = {}
        self._pins: dict[int, int] = {}
        self._publishing = asyncio.Lock()

    async def publish(self, state: Mapping[str, Tensor], *, step: int) -> WeightUpdate:
        """Copy the state on the lane and commit it under the next version."""
        async with self._publishing:
            self._prune(self._keep - 1)
            tensors, digest, dtype = await self._lane.run(snapshot, state, self._dtype)
            version = await self._ledger.begin_version(step)
            update = WeightUpdate(version=version, step=step, digest=digest, dtype=dtype, epoch=self._epoch)
            self._kept[version] = tensors
            await self._ledger.commit_version(update)
        return update

    async def restore(self, update: WeightUpdate, state: Mapping[str, Tensor]) -> None:
        """Offer a committed version again after a resume.

        Raises:
            EngineError: The state is not that version's.
        """
        tensors, digest, _ = await self._lane.run(snapshot, state, self._dtype)
        check_digest(update, digest)
        self._kept[update.version] = tensors
        self._prune(self._keep)

    async def fetch(self, update: WeightUpdate) -> Mapping[str, Tensor]:
        """The tensors of a version; they never change.

        Raises:
            EngineError: The version is no longer kept.
        """
        if update.version not in self._kept and self._publishing.locked():
            async with self._publishing:  # it made room for a newer one, which the caller finds when this has failed
                pass
        if update.version not in self._kept:
            raise gone(update, sorted(self._kept))
        return self._kept[update.version]

    def release(self, version: int) -> None:
        """Free a version that the engine has copied, unless it is pinned."""
        if version not in self._pins:
            self._kept.pop(version, None)

    def pin(self, version: int) -> None:
        """Keep a version until it is unpinned as often as it was pinned."""
        self._pins[version] = self._pins.get(version, 0) + 1

    def unpin(self, version: int) -> None:
        """Undo one `pin`."""
        self._pins[version] -= 1
        if not self._pins[version]:
            del self._pins[version]

    def _prune(self, keep: int) -> None:
        """Free all but the newest `keep` versions and those that are pinned."""
        for old in sorted(self._kept, reverse=True)[keep:]:
            if old not in self._pins:
                del self._kept[old]
