"""The section `eval` of a run file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from triune.ports import Sampling
from triune.settings import Settings
from triune.tasks import TasksSettings


class EvalSettings(Settings):
    """What to measure, how often, and on which weights."""

    every: Annotated[int, Field(ge=0)] = 0
    """Measure the first version published at or after every so many steps; 0 = never."""

    at_start: bool = True
    """Measure version 0, before any training, too (unless `every` is 0)."""

    tasks: TasksSettings | None = None
    """Held-out task sets, in the form of `tasks`; their `weight` is their share in the metric `eval/reward`."""

    limit: Annotated[int, Field(ge=1)] | None = None
    """Use the first so many tasks of each set; an endless set needs it."""

    samples: Annotated[int, Field(ge=1)] = 1
    """Rollouts per task: the n of mean@n, and the largest k of best@k and pass@k."""

    temperature: Annotated[float, Field(ge=0)] | None = None
    """Sampling temperature, 0 = greedy; null = that of training."""

    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Nucleus; null = that of training."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """New tokens per model call; null = as in training."""

    pass_threshold: float = 1.0
    """A rollout passes when its reward (or `part`) is at least this."""

    part: str | None = None
    """Measure this raw part of the reward instead of the total, so that shaping does not hide correctness."""

    during: Literal["hold", "copy", "checkpoint"] = "hold"
    """`hold`: training rollouts wait while the engine measures. `copy`: a second engine measures beside training.
    `checkpoint`: saved checkpoints are measured when the run has ended."""

    max_rollouts: Annotated[int, Field(ge=1)] = 256
    """How many rollouts run at the same time."""

    @model_validator(mode="after")
    def check_together(self) -> EvalSettings:
        """Refuse combinations that would measure nothing, or the same thing several times."""
        if self.every and self.tasks is None:
            raise ValueError("`every` is set, but there are no `tasks`; name held-out task sets, or set `every: 0`")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError("`temperature: 0` gives the same answer every time; set `samples: 1`, or a temperature")
        for key in ("order", "epochs"):
            if self.tasks is not None and key in self.tasks.model_fields_set:
                raise ValueError(f"`tasks.{key}` has no meaning here: every task is measured once; remove it")
        return self

    def sampling(self, training: Sampling) -> Sampling:
        """How to sample, given how training samples."""
        return Sampling(
            temperature=training.temperature if self.temperature is None else self.temperature,
            top_p=training.top_p if self.top_p is None else self.top_p,
            top_k=training.top_k,
            min_p=training.min_p,
            max_tokens=training.max_tokens if self.max_tokens is None else self.max_tokens,
            stop=training.stop,
            stop_ids=training.stop_ids,
            ignore_eos=training.ignore_eos,
        )
