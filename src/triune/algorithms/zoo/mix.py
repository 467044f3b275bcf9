"""Reinforcement mixed with imitation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triune.algorithms.advantages.grpo import GRPOAdvantage
from triune.algorithms.algorithm import Algorithm
from triune.algorithms.policy_losses.mix import MixLoss
from triune.algorithms.samplings.mix import MixSampling
from triune.registry import brick, brick_field


@brick("algorithm")
@dataclass(frozen=True, kw_only=True)
class Mix(Algorithm):
    """GRPO on fresh rollouts and supervised fine-tuning on expert answers, in one batch and one loss.

    For tasks that are solved too rarely to begin with, and for which some answers exist: the run file names them under
    `expert`. With every solution sampled often enough, GRPO alone gets as far.

    Source: MIX of Trinity-RFT, arXiv:2505.17826.
    """

    advantage: Any = brick_field("advantage", GRPOAdvantage())
    policy_loss: Any = brick_field("policy_loss", MixLoss())
    sampling: Any = brick_field("sampling", MixSampling())
