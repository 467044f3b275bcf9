"""Which run a trainer belongs to, and whether a checkpoint is of the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from triune.errors import CheckpointError
from triune.trainer.checkpoint import TrainState


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """What a checkpoint must agree with.

    Attributes:
        run: Its name; "" = what other runs made cannot be told apart.
        epoch: Incarnation of the run, from `buffer.open_run`.
        config_hash: Of the resolved configuration.
        data_hash: Of the task sets.
        allow_changes: Resume although the configuration differs.
    """

    run: str = ""
    epoch: int = 0
    config_hash: str = ""
    data_hash: str = ""
    allow_changes: bool = False

    def check(self, path: Path, state: TrainState) -> None:
        """Refuse a checkpoint of other data or, unless allowed, of another configuration.

        Raises:
            CheckpointError: What differs, and what to do.
        """
        if _differ(state.data_hash, self.data_hash):
            raise CheckpointError(
                str(path),
                f"was trained on task sets with hash {state.data_hash}",
                self.data_hash,
                "bring the data back, or start anew",
            )
        if _differ(state.config_hash, self.config_hash) and not self.allow_changes:
            raise CheckpointError(
                str(path), "was written with another configuration", "the same one", "allow changes explicitly"
            )


def _differ(one: str, other: str) -> bool:
    return bool(one and other and one != other)
