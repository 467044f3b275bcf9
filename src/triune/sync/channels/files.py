"""Weights between processes: one folder per version, written aside, renamed, read memory-mapped."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import msgspec

from triune.errors import ConfigError, StoreError
from triune.ports import Lane, WeightUpdate
from triune.registry import brick
from triune.sync.ledger import VersionLedger
from triune.sync.snapshot import check_digest, gone, snapshot, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor

_FOLDER = re.compile(r"v(\d{8})")
_WEIGHTS, _UPDATE = "weights.safetensors", "update.json"


@brick("channel")
@dataclass(frozen=True, kw_only=True)
class Files:
    """Explorer and trainer are processes on one machine or one shared disk; a version is a folder of safetensors."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What is published; `auto` is what the engine computes in."""
    keep: int = 3
    """Newest versions that stay on disk; pinned ones stay too."""
    folder: str | None = None
    """Where; null is `weights` in the run's folder."""

    def __call__(
        self, *, ledger: VersionLedger, lane: Lane, folder: Path | None = None, dtype: str = "auto", epoch: int = 0
    ) -> FileChannel:
        """Open the channel.

        Args:
            ledger: The buffer.
            lane: Where copies and digests are computed.
            folder: `weights` of the run, unless the brick names another.
            dtype: The engine's, used when the brick says `auto`; `auto` again keeps the masters' dtype.
            epoch: Incarnation of the run.

        Raises:
            ConfigError: No folder is named anywhere.
        """
        where = Path(self.folder) if self.folder is not None else folder
        if where is None:
            raise ConfigError("sync.channel.folder", "no folder", "a folder that both processes see")
        chosen = dtype if self.dtype == "auto" else self.dtype
        return FileChannel(where, ledger, lane, dtype=chosen, keep=self.keep, epoch=epoch)


class FileChannel:
    """Implements `WeightChannel`: `v00000012/` appears by one rename, complete with its digest."""

    def __init__(self, folder: Path, ledger: VersionLedger, lane: Lane, *, dtype: str, keep: int, epoch: int) -> None:
        self.folder = folder
        self._ledger, self._lane, self._dtype = ledger, lane, torch_dtype(dtype)
        self._keep, self._epoch = max(keep, 1), epoch

    async def publish(self, state: Mapping[str, Tensor], *, step: int) -> WeightUpdate:
        """Write a copy of the state under the next version and commit it.

        Raises:
            StoreError: The disk is full or the folder cannot be written.
        """
        tensors, digest, dtype = await self._lane.run(snapshot, state, self._dtype)
        version = await self._ledger.begin_version(step)
        update = WeightUpdate(
            version=version, step=step, digest=digest, dtype=dtype, epoch=self._epoch, location=str(self._of(version))
        )
        await asyncio.to_thread(self._write, update, tensors)  # disk only: no torch kernel runs there
        await self._ledger.commit_version(update)
        await asyncio.to_thread(self._prune, version)
        return update

    async def restore(self, update: WeightUpdate, state: Mapping[str, Tensor]) -> None:
        """Offer a committed version again after a resume, writing it again when it was pruned meanwhile.

        Raises:
            EngineError: The state is not that version's.
        """
        tensors, digest, _ = await self._lane.run(snapshot, state, self._dtype)
        check_digest(update, digest)
        if not self._of(update.version).exists():
            await asyncio.to_thread(self._write, update, tensors)

    async def fetch(self, update: WeightUpdate) -> Mapping[str, Tensor]:
        """Map the tensors of a version into memory; they stay readable when the folder is pruned.

        Raises:
            EngineError: The version is no longer kept.
        """
        return await asyncio.to_thread(self._read, update)

    def release(self, version: int) -> None:
        """Nothing to free: other processes may still read the files."""

    def pin(self, version: int, owner: str = "evaluation") -> None:
        """Keep a version on disk until `unpin`, or until the next incarnation of the run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._pin_file(version, owner).touch()

    def unpin(self, version: int, owner: str = "evaluation") -> None:
        """Undo `pin`."""
        self._pin_file(version, owner).unlink(missing_ok=True)

    def versions(self) -> list[int]:
        """Versions that can be fetched, oldest first."""
        if not self.folder.is_dir():
            return []
        found = (_FOLDER.fullmatch(entry.name) for entry in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def _of(self, version: int) -> Path:
        return self.folder / f"v{version:08d}"

    def _pin_file(self, version: int, owner: str) -> Path:
        return self.folder / f"v{version:08d}.{self._epoch}.{owner}.pin"

    def _write(self, update: WeightUpdate, tensors: Mapping[str, Tensor]) -> None:
        from safetensors.torch import save_file

        target = self._of(update.version)
        partial = self.folder / f".{target.name}.{os.getpid()}.partial"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            on_cpu = {name: value.cpu() for name, value in tensors.items()}
            save_file(on_cpu, partial / _WEIGHTS, metadata={"format": "pt", "digest": update.digest})
            (partial / _UPDATE).write_bytes(msgspec.json.format(msgspec.json.encode(update)))
            for name in (_WEIGHTS, _UPDATE):
                _fsync(partial / name)
            partial.rename(target)
            _fsync(self.folder)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise StoreError(
                str(self.folder), f"version {update.version} cannot be written ({error})", "", "free disk space, resume"
            ) from error

    def _read(self, update: WeightUpdate) -> Mapping[str, Tensor]:
        from safetensors.torch import load_file

        here = self._of(update.version)  # where this process sees the disk may differ from where the trainer does
        folder = here if here.exists() or not update.location else Path(update.location)
        try:
            return MappingProxyType(load_file(folder / _WEIGHTS))
        except FileNotFoundError as error:
            raise gone(update, self.versions()) from error

    def _prune(self, newest: int) -> None:
        """Remove all but the newest `keep`, the one just written and what this incarnation has pinned.

        What earlier incarnations had half written or pinned goes too.
        """
        pinned = set()
        for pin in self.folder.glob("v*.pin"):
            if int(pin.name.split(".")[1]) >= self._epoch:
                pinned.add(int(pin.name[1:9]))
            else:
                pin.unlink(missing_ok=True)
        for partial in self.folder.glob(".v*.partial"):
            shutil.rmtree(partial, ignore_errors=True)
        for version in self.versions()[: -self._keep]:
            if version != newest and version not in pinned:
                shutil.rmtree(self._of(version), ignore_errors=True)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
