"""Reinforcement with imitation that fades."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triune.algorithms.advantages.grpo import GRPOAdvantage
from triune.algorithms.algorithm import Algorithm
from triune.algorithms.policy_losses.chord import Chord
from triune.algorithms.samplings.mix import MixSampling
from triune.registry import brick, brick_field


@brick("algorithm", "chord")
@dataclass(frozen=True, kw_only=True)
class CHORD(Algorithm):
    """MIX whose imitation is weighed per token and fades over the steps, so that the expert leads and then lets go.

    For expert answers in another style than the policy's, which plain imitation would force on it. The run file names
    them under `expert`; `policy_loss.decay_steps` should end within the run.

    Source: CHORD, arXiv:2508.11408.
    """

    advantage: Any = brick_field("advantage", GRPOAdvantage())
    policy_loss: Any = brick_field("policy_loss", Chord())
    sampling: Any = brick_field("sampling", MixSampling())
