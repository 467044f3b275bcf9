"""What a step consumes, in every unit somebody may think in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from triune.config.run_config import RunConfig

UNITS = ("tasks_per_step", "sequences_per_step", "pairs_per_step")
"""Keys of section `trainer` of which a run file has exactly one."""


def wanted_unit(algorithm: Any) -> str:
    """The key of section `trainer` that counts what an algorithm consumes: groups of tasks, sequences or pairs."""
    return f"{algorithm.unit}s_per_step"


class Consumption(msgspec.Struct, frozen=True, kw_only=True):
    """What one step takes and gives; `None` where the data decides.

    Attributes:
        groups: Groups (task instances) of a step; None for imitation and preference learning.
        rollouts: Rollouts the explorer makes of a task.
        sequences: Rollouts or sequences of a step.
        pairs: Preference pairs of a step.
        updates: Optimiser updates of a step: epochs x mini-batches.
        sequences_per_update: Rollouts or sequences of one update.
        versions_per_step: Versions published per step.
        ahead_groups: Groups that may be admitted before the first step is done.
        steps: Steps of the whole run; None = until the tasks end.
        total_rollouts: Rollouts of the whole run.
    """

    groups: int | None
    rollouts: int | None
    sequences: int | None
    pairs: int | None
    updates: int
    sequences_per_update: float | None
    versions_per_step: float
    ahead_groups: int | None
    steps: int | None
    total_rollouts: int | None

    def lines(self) -> list[str]:
        """One sentence per figure, for `triune check`."""
        found = []
        if self.groups is not None:
            found.append(f"groups per step        {self.groups}  (tasks; {self.rollouts} rollouts each where sampled)")
        if self.pairs is not None:
            found.append(f"pairs per step         {self.pairs}")
        if self.sequences is not None:
            found.append(f"sequences per step     {self.sequences}  (single-turn; more when turns do not merge)")
        found.append(f"updates per step       {self.updates}  (epochs x mini-batches)")
        if self.sequences_per_update is not None:
            found.append(f"sequences per update   {self.sequences_per_update:g}")
        found.append(f"versions per step      {self.versions_per_step:g}")
        if self.ahead_groups is not None:
            found.append(f"groups ahead at most   {self.ahead_groups}  (admitted before they are trained on)")
        found.append(f"steps                  {self.steps if self.steps is not None else 'until the tasks end'}")
        if self.total_rollouts is not None:
            found.append(f"rollouts in all        {self.total_rollouts}")
        return found


def consumption(config: RunConfig) -> Consumption:
    """Work out what a step of this configuration consumes."""
    trainer, size = config.trainer, config.algorithm.group_size
    groups: int | None = getattr(trainer, "tasks_per_step", None)
    pairs: int | None = getattr(trainer, "pairs_per_step", None)
    sequences: int | None = groups * size if groups else getattr(trainer, "sequences_per_step", None)
    if pairs:
        sequences = 2 * pairs
    sampling = config.algorithm.sampling
    fresh = getattr(sampling, "fresh_ratio", 1.0)
    if groups and "expert" in getattr(sampling, "buffers", ()):  # an expert's answer is one sequence, no group
        sequences = round(groups * (fresh * size + 1 - fresh))
    steps: int | None = getattr(trainer, "steps", None)
    return Consumption(
        groups=groups,
        rollouts=config.algorithm.num_members if groups else None,
        sequences=sequences,
        pairs=pairs,
        updates=trainer.epochs * trainer.mini_batches,
        sequences_per_update=sequences / trainer.mini_batches if sequences else None,
        versions_per_step=1 / config.sync.every,
        ahead_groups=round((config.sync.max_staleness + 1) * config.sync.every * groups * fresh) if groups else None,
        steps=steps,
        total_rollouts=round(steps * groups * fresh) * config.algorithm.num_members if steps and groups else None,
    )
