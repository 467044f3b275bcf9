"""Settings of the trainer: what a step consumes, how it updates, what it saves."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from triune.settings import Settings


class TrainerSettings(Settings):
    """A step consumes one batch and makes `epochs x mini_batches` optimiser updates."""

    steps: int = Field(default=100, ge=0)
    """Batches to consume; the run ends earlier when the data does."""

    tasks_per_step: int | None = Field(default=None, ge=1)
    """Groups (a task with all its rollouts) in a batch. Give the one unit that the algorithm consumes; 16 when none is
    given."""

    sequences_per_step: int | None = Field(default=None, ge=1)
    """Rows (an answer, a labelled answer, a text) in a batch, for supervised training."""

    pairs_per_step: int | None = Field(default=None, ge=1)
    """Preference pairs in a batch, two sequences each."""

    epochs: int = Field(default=1, ge=1)
    """Passes over each batch; more than one is off-policy within the step."""

    mini_batches: int = Field(default=1, ge=1)
    """Parts a batch is cut into, one update each; a rollout is never cut."""

    tokens_per_micro_batch: int | None = Field(default=None, ge=1)
    """Tokens (padding included) that go through the model at once. Changes memory and speed, never the loss. null: by
    the size of the model and the device."""

    learning_rate: float = Field(default=1e-6, ge=0)
    """Peak learning rate of AdamW."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls to 0 between warm-up and the last step."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled decay of weight matrices; norms and biases have none."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's running averages."""

    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients with a larger norm are scaled down to it."""

    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """What matrix products compute in. `bfloat16` is autocast over float32 masters; `auto` takes it on a GPU and, on
    a CPU that multiplies bfloat16 in hardware, for models above 20M parameters."""

    float32_matmul: Literal["medium", "high", "highest"] = "medium"
    """Inner precision of float32 matrix products on a CPU; `medium` is about five times faster than `highest` where the
    CPU multiplies bfloat16 in hardware. Other CPUs always compute in full float32."""

    max_bad_updates: int = Field(default=3, ge=1)
    """Updates in a row whose loss or gradient is not finite before the run stops; each is skipped."""

    max_untrainable_batches: int = Field(default=3, ge=1)
    """Batches in a row without a token to train on before the run stops; each is consumed and skipped."""

    save_every: int = Field(default=50, ge=0)
    """Steps between two checkpoints; 0 saves only at the end."""

    keep_checkpoints: int | None = Field(default=3, ge=1)
    """Newest checkpoints that stay on disk; null keeps all."""

    @model_validator(mode="after")
    def _one_unit(self) -> TrainerSettings:
        units = ("tasks_per_step", "sequences_per_step", "pairs_per_step")
        given = [unit for unit in units if getattr(self, unit) is not None]
        if len(given) > 1:
            raise ValueError(f"give {given[0]} or {given[1]}, not both")
        return self

    @property
    def entries_per_step(self) -> int:
        """Entries of the buffer that a step leases."""
        return self.pairs_per_step or self.sequences_per_step or self.tasks_per_step or 16

    @property
    def updates_per_step(self) -> int:
        """Optimiser updates of a step."""
        return self.epochs * self.mini_batches
