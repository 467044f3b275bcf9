"""The whole of a run file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PrivateAttr

from triune.buffer.config import BufferSettings
from triune.config.plain import Origin, hash_of, leaves, to_plain
from triune.config.plugins import Plugin
from triune.evaluation.config import EvalSettings
from triune.explorer.config import ExplorerSettings
from triune.models.config import EndpointSettings, ModelSettings
from triune.monitor.config import MonitorSettings
from triune.settings import BrickOf, Settings
from triune.sync.config import SyncSettings
from triune.tasks.config import ExpertSettings, TasksSettings
from triune.trainer.config import TrainerSettings

MAY_CHANGE = (
    "runs_dir",
    "monitor",
    "models",
    "trainer.steps",
    "trainer.save_every",
    "trainer.keep_checkpoints",
    "trainer.tokens_per_micro_batch",
    "explorer.max_rollouts",
    "explorer.runner",
    "explorer.runners",
    "explorer.engine.slots",
    "eval.every",
    "eval.at_start",
    "buffer.lease_s",
    "buffer.segments",
)
"""What a resumed run may change: where and how it runs, not what it computes. `trainer.steps` counts as
computed when the learning-rate schedule looks at it."""


NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
"""What a run may be called: its name is a folder."""


class RunConfig(Settings):
    """A run file: which model learns which tasks with which algorithm."""

    name: str = Field(default="run", pattern=NAME)
    """Name of the run; its folder is `<runs_dir>/<name>`. Default: the name of the run file."""

    seed: int = Field(default=0, ge=0)
    """Seed of tasks, sampling and training."""

    deterministic: bool = False
    """Bit-identical on the same machine, versions and threads; needs `sync.max_staleness: 0` and `style: drain`."""

    runs_dir: str = "runs"
    """Folder of all runs."""

    plugins: tuple[str, ...] = ()
    """Python files that mark bricks of your own, relative to the run file; copied into the run's folder."""

    model: ModelSettings = ModelSettings()
    """The policy."""

    teacher: ModelSettings | None = None
    """A frozen model beside the policy, with the same vocabulary, whose log-probs of the sampled tokens distillation
    learns from. Only `path`, `dtype` and `trust_remote_code` count."""

    models: dict[str, EndpointSettings] = Field(default_factory=dict)
    """Other models by name (judges), behind OpenAI-compatible endpoints."""

    tasks: TasksSettings
    """What to learn: one task set or several."""

    expert: ExpertSettings | None = None
    """Answers to imitate beside what is sampled, in the form of `tasks`, for algorithms that mix them in (`mix`)."""

    eval: EvalSettings = EvalSettings()
    """Held-out tasks and when to measure on them."""

    algorithm: Annotated[Any, BrickOf("algorithm")] = "grpo"
    """The algorithm: a brick that names its bricks (advantage, policy loss, KL, entropy, sampling)."""

    pipeline: tuple[Annotated[Any, BrickOf("operator")], ...] = ()
    """Operators on finished groups, in order; the algorithm's advantage is computed after them."""

    buffer: BufferSettings = BufferSettings()
    """Where experience is kept."""

    explorer: ExplorerSettings = ExplorerSettings()
    """How rollouts are sampled."""

    trainer: TrainerSettings = TrainerSettings()
    """How weights are trained."""

    sync: SyncSettings = SyncSettings()
    """How often weights travel, and how stale experience may be."""

    monitor: MonitorSettings = MonitorSettings()
    """What is recorded and watched."""

    stages: tuple[dict[str, Any], ...] = ()
    """Runs one after another, each a mapping of what differs from the rest of the file, with a `name`. Each begins with
    the weights that the one before it exported. Mappings are merged field by field; one that names another brick with
    `use` replaces the whole brick. `runs_dir`, `plugins` and `stages` belong to the top of the file."""

    _origins: dict[str, Origin] = PrivateAttr(default_factory=dict)
    _plugins: tuple[Plugin, ...] = PrivateAttr(default=())

    @property
    def run_dir(self) -> Path:
        """`<runs_dir>/<name>`."""
        return Path(self.runs_dir) / self.name

    @property
    def origins(self) -> dict[str, Origin]:
        """Dotted path of every value → `default`, `file`, `override` or `derived`."""
        return self._origins

    @property
    def loaded_plugins(self) -> tuple[Plugin, ...]:
        """The plug-in files that were imported for it."""
        return self._plugins

    def to_plain(self) -> dict[str, Any]:
        """As a mapping of plain values that `load_config` reads again."""
        plain = to_plain(self)
        del plain["stages"]  # each of them is a configuration of its own
        if plain["eval"]["tasks"] is not None:  # refused there: every task is measured once
            plain["eval"]["tasks"] = {"sets": plain["eval"]["tasks"]["sets"]}
        return plain


def frozen_part(plain: dict[str, Any], plugin_names: list[str], origins: Mapping[str, str]) -> dict[str, Any]:
    """What a resumed run may not change, by dotted path; plug-ins by their content.

    A model path that was derived is the export of the stage before, known by the digest of its weights: the folder of
    all stages may be moved.
    """
    is_flat = plain["trainer"].get("schedule") in (None, "constant")
    free = [path for path in MAY_CHANGE if path != "trainer.steps" or is_flat] + ["plugins"]
    free += ["model.path"] * (origins.get("model.path") == "derived")
    kept = {
        path: value
        for path, value in leaves(plain)
        if not any(path == prefix or path.startswith(f"{prefix}.") for prefix in free)
    }
    return {**kept, "plugins": sorted(plugin_names)}


def config_hash(config: RunConfig) -> str:
    """Hash over what a resume may not change."""
    modules = [plugin.module for plugin in config.loaded_plugins]
    return hash_of(frozen_part(config.to_plain(), modules, config.origins))
