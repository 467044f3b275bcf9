"""Jensen-Shannon distillation on one's own answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triune.algorithms.advantages.jsd import JSDAdvantage
from triune.algorithms.algorithm import Algorithm
from triune.algorithms.policy_losses.ppo_clip import PPOClip
from triune.registry import brick, brick_field


@brick("algorithm")
@dataclass(frozen=True, kw_only=True)
class JSD(Algorithm):
    """Like `on_policy_distill` with a divergence between the two KLs: `advantage: {beta: …}` near 1 seeks the
    teacher's main mode, near 0 covers all. In between a token that the teacher finds impossible is blamed by a
    bounded amount.

    Needs a teacher (section `teacher`), or experience that stores its log-probs.

    Source: arXiv:2306.13649.
    """

    advantage: Any = brick_field("advantage", JSDAdvantage())
    policy_loss: Any = brick_field("policy_loss", PPOClip())
    group_size: int = 4
