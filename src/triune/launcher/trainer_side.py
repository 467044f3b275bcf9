"""Build the trainer's half of a run: policy, weight channel, checkpoints, loop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triune.config import RunConfig, config_hash
from triune.launcher.tasks import Tasks
from triune.models import check_same_vocabulary, default_device, load_model
from triune.monitor import RunMonitor
from triune.ports import Buffer, Lane, WeightChannel
from triune.trainer import Checkpoints

if TYPE_CHECKING:
    from triune.trainer import Policy, Trainer


@dataclass(frozen=True, kw_only=True)
class TrainerSide:
    """What trains.

    Attributes:
        loop: The trainer.
        policy: Its model.
        channel: Where it publishes; an explorer in this process fetches from it.
    """

    loop: Trainer
    policy: Policy
    channel: WeightChannel


def find_checkpoints(config: RunConfig, folder: Path) -> Checkpoints:
    """The checkpoint folders of a run."""
    return Checkpoints(folder / "checkpoints", keep=config.trainer.keep_checkpoints)


def load_policy(config: RunConfig) -> Policy:
    """The model in training; call it on the lane."""
    from transformers.utils.logging import disable_progress_bar

    from triune.trainer import Policy

    disable_progress_bar()  # a bar per shard would break the console's lines
    model = load_model(config.model, default_device(), seed=config.seed)
    return Policy(model, precision=config.trainer.precision, float32_matmul=config.trainer.float32_matmul)


def load_teacher(config: RunConfig) -> Policy | None:
    """The frozen model whose log-probs the algorithm reads; call it on the lane.

    Raises:
        ConfigError: It does not load, or means other tokens by the policy's ids.
    """
    from triune.trainer import Policy

    if config.teacher is None:
        return None
    check_same_vocabulary(config.model, config.teacher, "teacher")
    model = load_model(config.teacher, default_device(), where="teacher").requires_grad_(False)
    return Policy(model, precision=config.trainer.precision, float32_matmul=config.trainer.float32_matmul)


def load_critic_model(config: RunConfig) -> Any:
    """The model whose body the critic takes, or None when it is the policy's; call it on the lane.

    Raises:
        ConfigError: It does not load, or means other tokens by the policy's ids.
    """
    path = getattr(config.algorithm.critic, "path", None)
    if path is None:
        return None
    settings = config.model.model_copy(update={"path": path})
    check_same_vocabulary(config.model, settings, "algorithm.critic")
    return load_model(settings, default_device(), seed=config.seed, where="algorithm.critic")


def published_dtype(config: RunConfig, policy: Policy) -> str:
    """What versions are published in: what the engine is told to compute in, by default what the trainer does."""
    asked = getattr(config.explorer.engine, "dtype", "auto")
    return str(policy.dtype).removeprefix("torch.") if asked == "auto" else asked


async def build_trainer_side(
    config: RunConfig,
    *,
    tasks: Tasks,
    buffer: Buffer,
    lane: Lane,
    monitor: RunMonitor,
    folder: Path,
    epoch: int,
    allow_changes: bool,
) -> TrainerSide:
    """Load the model and wire the trainer to the buffer."""
    from triune.trainer import RunIdentity, Trainer

    policy = await lane.run(load_policy, config)
    channel = config.sync.channel(
        ledger=buffer, lane=lane, folder=folder / "weights", dtype=published_dtype(config, policy), epoch=epoch
    )
    checkpoints = find_checkpoints(config, folder)
    loop = Trainer(
        config.trainer,
        policy,
        config.algorithm,
        buffer=buffer,
        channel=channel,
        lane=lane,
        monitor=monitor,
        checkpoints=checkpoints,
        every=config.sync.every,
        max_staleness=config.sync.max_staleness,
        seed=config.seed,
        identity=RunIdentity(
            run=config.name,
            epoch=epoch,
            config_hash=config_hash(config),
            data_hash=tasks.data_hash,
            allow_changes=allow_changes,
        ),
        resume_from=checkpoints.latest(),
        critic_model=await lane.run(load_critic_model, config),
        teacher=await lane.run(load_teacher, config),
    )
    return TrainerSide(loop=loop, policy=policy, channel=channel)
