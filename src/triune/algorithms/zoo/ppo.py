"""Proximal policy optimisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triune.algorithms.advantages.gae import GAE
from triune.algorithms.algorithm import Algorithm
from triune.algorithms.critics.value_model import ValueModel
from triune.algorithms.policy_losses.ppo_clip import PPOClip
from triune.registry import brick, brick_field


@brick("algorithm")
@dataclass(frozen=True, kw_only=True)
class PPO(Algorithm):
    """A critic says what was to be expected before every token; what went better is reinforced, through PPO's clip.

    One rollout per task is enough, and single steps of long answers get their own credit, for the price of a second
    model. Let the critic learn first (`critic: {warmup_steps: 10}`). RLHF holds the policy near the reference from
    inside the reward: `kl: {use: k1, place: reward, coefficient: 0.05}`, steered by `target` where it should be.

    Source: arXiv:1707.06347; for language models, arXiv:1909.08593.
    """

    advantage: Any = brick_field("advantage", GAE())
    policy_loss: Any = brick_field("policy_loss", PPOClip())
    critic: Any = brick_field("critic", ValueModel())
    group_size: int = 1
