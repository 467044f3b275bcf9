"""GRPO with DAPO's four changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triune.algorithms.advantages.grpo import GRPOAdvantage
from triune.algorithms.algorithm import Algorithm
from triune.algorithms.policy_losses.ppo_clip import PPOClip
from triune.algorithms.samplings.dynamic import Dynamic
from triune.registry import brick, brick_field


@brick("algorithm")
@dataclass(frozen=True, kw_only=True)
class DAPO(Algorithm):
    """GRPO that clips higher above than below, averages over the tokens of the batch, and replaces flat groups.

    For long answers and rewards of pass or fail, where entropy collapses and ever more groups teach nothing. The
    fourth change, a soft penalty on overlong answers, is the operator `length_penalty` in the pipeline; flat is told
    by the reward before it.

    Source: arXiv:2503.14476.
    """

    advantage: Any = brick_field("advantage", GRPOAdvantage())
    policy_loss: Any = brick_field("policy_loss", PPOClip(clip_high=0.28))
    sampling: Any = brick_field("sampling", Dynamic())
