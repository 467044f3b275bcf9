"""Checkpoints: folders that appear complete, in one rename, or not at all."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from triune.errors import CheckpointError, StoreError
from triune.failpoints import failpoint

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
_NAME = re.compile(r"step-(\d{8})")
_WEIGHTS, _OPTIMISER, _STATE = "weights.safetensors", "optimiser.safetensors", "state.json"
_PUBLISHED, _CRITIC = "published.safetensors", "critic.safetensors"


class TrainState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of a checkpoint that is no large tensor.

    Attributes:
        step: Steps done.
        updates: Optimiser updates applied.
        line: (version, step) of every publish on the surviving line, oldest first.
        consumed: (entry, use number) of every batch since the checkpoint before.
        bricks: State of the algorithm's bricks.
        packed: The same on the disk, as msgpack in hexadecimal: JSON has no infinity, no bytes and no numbers as keys.
        bad_updates: Updates in a row that were not finite.
        untrainable: Batches in a row with nothing to train on.
        rng: State of torch's generator, in hexadecimal.
        config_hash: Of the resolved configuration.
        data_hash: Of the task sets.
        sizes: Bytes of the files beside this one, so that a damaged folder is told from a complete one.
        format: Version of this layout.
    """

    step: int
    updates: int = 0
    line: list[tuple[int, int]] = []
    consumed: list[tuple[str, int]] = []
    bricks: dict[str, Any] = {}
    packed: str = ""
    bad_updates: int = 0
    untrainable: int = 0
    rng: str = ""
    config_hash: str = ""
    data_hash: str = ""
    sizes: dict[str, int] = {}
    format: int = FORMAT


class Checkpoints:
    """The folders `step-N/` of a run.

    Args:
        folder: `checkpoints/` of the run.
        keep: Newest ones that stay; None keeps all.
    """

    def __init__(self, folder: Path | str, *, keep: int | None = 3) -> None:
        self.folder, self.keep = Path(folder), keep

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        if not self.folder.is_dir():
            return []
        found = (_NAME.fullmatch(entry.name) for entry in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match and self._is_complete(int(match[1])))

    def latest(self) -> str | None:
        """Folder of the newest complete checkpoint, or None."""
        steps = self.steps()
        return str(self.path(steps[-1])) if steps else None

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is or would be."""
        return self.folder / f"step-{step:08d}"

    def save(
        self,
        state: TrainState,
        weights: Mapping[str, Tensor],
        optimiser: Mapping[str, Tensor],
        published: Mapping[str, Tensor] | None = None,
        critic: Mapping[str, Tensor] | None = None,
        fence: Callable[[], object] | None = None,
    ) -> Path:
        """Write a checkpoint aside, flush it to disk, rename it, remove old ones.

        Reads tensors and writes files only, so it may run beside the lane while nobody updates the weights.

        Args:
            state: Everything small.
            weights: Of the trained parameters.
            optimiser: Its state.
            published: The newest version, where the weights have moved on since.
            critic: Weights and optimiser state of the value model, where there is one.
            fence: Asked before anything is touched and before the rename; what it raises stops the rest.

        Raises:
            StoreError: The disk is full or the folder cannot be written; older checkpoints are untouched.
        """
        target = self.path(state.step)
        partial = self.folder / f".{target.name}.{os.getpid()}.partial"
        fence = fence or (lambda: None)
        fence()
        try:
            self._remove_partials()
            partial.mkdir(parents=True)
            sizes = {_WEIGHTS: _write_tensors(partial / _WEIGHTS, weights)}
            sizes[_OPTIMISER] = _write_tensors(partial / _OPTIMISER, optimiser)
            for name, tensors in ((_PUBLISHED, published), (_CRITIC, critic)):
                if tensors:
                    sizes[name] = _write_tensors(partial / name, tensors)
            complete = msgspec.structs.replace(state, sizes=sizes, bricks={}, packed=_pack(state.bricks))
            (partial / _STATE).write_bytes(msgspec.json.format(msgspec.json.encode(complete)))
            _fsync(partial / _STATE)
            _fsync(partial)
            failpoint("trainer.checkpoint.before_rename")
            fence()
            if target.exists():
                shutil.rmtree(target)
            partial.rename(target)
            _fsync(self.folder)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise StoreError(
                str(self.folder),
                f"the checkpoint of step {state.step} cannot be written ({error})",
                "",
                "free disk space, then resume: nothing that was consumed since the last one is lost",
            ) from error
        except StoreError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        failpoint("trainer.checkpoint.after_rename")
        for step in self.steps()[: -self.keep] if self.keep else []:
            shutil.rmtree(self.path(step), ignore_errors=True)
        return target

    def load(self, path: Path | str) -> tuple[TrainState, dict[str, Tensor], dict[str, Tensor]]:
        """State, weights and optimiser state of a checkpoint.

        Raises:
            CheckpointError: It is incomplete, damaged or written by a newer version.
        """
        from safetensors.torch import load_file

        folder = Path(path)
        state = _read_state(folder)
        if state is None or not _has_sizes(folder, state):
            raise CheckpointError(str(folder), "is incomplete", "a complete checkpoint", "resume from an older one")
        if state.format > FORMAT:
            raise CheckpointError(str(folder), f"format {state.format}", f"at most {FORMAT}", "use a newer triune")
        return state, load_file(folder / _WEIGHTS), load_file(folder / _OPTIMISER)

    def load_published(self, path: Path | str) -> dict[str, Tensor]:
        """The version that explorers sampled from, where the checkpoint was made between two; else nothing."""
        return _load_optional(Path(path) / _PUBLISHED)

    def load_critic(self, path: Path | str) -> dict[str, Tensor]:
        """Weights and optimiser state of the value model; nothing where the run had none."""
        return _load_optional(Path(path) / _CRITIC)

    def _is_complete(self, step: int) -> bool:
        state = _read_state(self.path(step))
        return state is not None and state.step == step and _has_sizes(self.path(step), state)

    def _remove_partials(self) -> None:
        for partial in self.folder.glob(".step-*.partial"):
            shutil.rmtree(partial, ignore_errors=True)


def read_state(path: Path | str) -> TrainState:
    """The small part of a checkpoint, without torch.

    Raises:
        CheckpointError: There is none.
    """
    state = _read_state(Path(path))
    if state is None:
        raise CheckpointError(str(path), "holds no readable state.json", "a checkpoint folder `step-N`")
    return state


def _read_state(folder: Path) -> TrainState | None:
    try:
        state = msgspec.json.decode((folder / _STATE).read_bytes(), type=TrainState)
        if not state.packed:
            return state  # of an older version, or without bricks that have a state
        return msgspec.structs.replace(state, bricks=msgspec.msgpack.decode(bytes.fromhex(state.packed)), packed="")
    except (OSError, ValueError, msgspec.MsgspecError):
        return None


def _pack(bricks: Mapping[str, Any]) -> str:
    return msgspec.msgpack.encode(bricks).hex()


def _has_sizes(folder: Path, state: TrainState) -> bool:
    paths = {name: folder / name for name in (_WEIGHTS, _OPTIMISER, *state.sizes)}
    return all(path.is_file() and path.stat().st_size == state.sizes.get(name) for name, path in paths.items())


def _load_optional(file: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(file) if file.exists() else {}


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> int:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, path)
    except SafetensorError as error:  # what it makes of a full disk
        raise OSError(str(error)) from error
    _fsync(path)
    return path.stat().st_size


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
