"""Group sequence policy optimisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triune.algorithms.advantages.grpo import GRPOAdvantage
from triune.algorithms.algorithm import Algorithm
from triune.algorithms.policy_losses.gspo import GSPO as GSPOLoss
from triune.registry import brick, brick_field


@brick("algorithm")
@dataclass(frozen=True, kw_only=True)
class GSPO(Algorithm):
    """GRPO with ratio and clip of the whole answer, length-normalised, as the reward is the whole answer's.

    For mixtures of experts and long answers, where ratios of single tokens are mostly noise. The clip is a thousandth
    of PPO's; with several turns of different advantages write `policy_loss: {token_level: true}`.

    Source: arXiv:2507.18071.
    """

    advantage: Any = brick_field("advantage", GRPOAdvantage())
    policy_loss: Any = brick_field("policy_loss", GSPOLoss())
