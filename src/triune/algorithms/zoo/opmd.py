"""Online policy mirror descent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triune.algorithms.advantages.opmd import OPMDAdvantage
from triune.algorithms.algorithm import Algorithm
from triune.algorithms.policy_losses.opmd import OPMD as OPMDLoss
from triune.registry import brick, brick_field


@brick("algorithm")
@dataclass(frozen=True, kw_only=True)
class OPMD(Algorithm):
    """Rewards minus the group's mean through REINFORCE, held near the policy that began the step by the square of
    the log-ratio: made for stale and foreign samples, without importance weights and clip.

    The published baseline, of which the mean is the limit: `advantage: {baseline: log_avg_exp, tau: …}` with the
    same `tau` as the loss.

    Source: Kimi k1.5, arXiv:2501.12599; arXiv:2509.24203.
    """

    advantage: Any = brick_field("advantage", OPMDAdvantage())
    policy_loss: Any = brick_field("policy_loss", OPMDLoss())
