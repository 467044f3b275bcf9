"""Rejection-sampling fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triune.algorithms.advantages.raft import RaftAdvantage
from triune.algorithms.algorithm import Algorithm
from triune.algorithms.policy_losses.reinforce import Reinforce
from triune.registry import brick, brick_field


@brick("algorithm")
@dataclass(frozen=True, kw_only=True)
class RAFT(Algorithm):
    """Sample, keep what the reward likes, imitate it: the simplest way to learn from one's own answers.

    With the advantage 1 on what is kept, `reinforce` is the loss of fine-tuning; `policy_loss: ppo_clip` makes it
    RAFT++ (arXiv:2504.11343), which stands several updates per step. The paper keeps the best answer of every task:
    `advantage: {above: null, best: 1}`. Nothing is learned from failures, and entropy falls fast.

    Source: arXiv:2304.06767.
    """

    advantage: Any = brick_field("advantage", RaftAdvantage())
    policy_loss: Any = brick_field("policy_loss", Reinforce())
