"""REINFORCE++."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triune.algorithms.advantages.reinforce_pp import ReinforcePPAdvantage
from triune.algorithms.algorithm import Algorithm
from triune.algorithms.kls.k1 import K1
from triune.algorithms.policy_losses.ppo_clip import PPOClip
from triune.registry import brick, brick_field


@brick("algorithm")
@dataclass(frozen=True, kw_only=True)
class ReinforcePP(Algorithm):
    """One rollout per task is enough: the whole batch is the baseline. KL to the reference is subtracted from the
    reward of every token, returns are whitened over the batch, and PPO's clip bounds the step. For many different
    tasks.

    With several rollouts per task write `advantage: reinforce_pp_baseline`, `group_size: 8` and, as that variant
    has no reward per token, `kl: {use: k2, place: loss}`.

    Source: arXiv:2501.03262.
    """

    advantage: Any = brick_field("advantage", ReinforcePPAdvantage())
    policy_loss: Any = brick_field("policy_loss", PPOClip())
    kl: Any = brick_field("kl", K1(coefficient=0.01, place="reward"))
    group_size: int = 1
