"""The trainer: leases experience, updates the policy, publishes versions, saves checkpoints.

Settings and checkpoint folders load without torch; the rest is imported when it is first named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triune.trainer.checkpoint import Checkpoints, TrainState, read_state
from triune.trainer.config import TrainerSettings
from triune.trainer.identity import RunIdentity

if TYPE_CHECKING:
    from triune.trainer.policy import Policy
    from triune.trainer.trainer import Trainer

_LAZY = {"Policy": "policy", "Trainer": "trainer"}

__all__ = ["Checkpoints", "Policy", "RunIdentity", "TrainState", "Trainer", "TrainerSettings", "read_state"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
