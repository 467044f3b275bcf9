"""Baselines of online policy mirror descent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from triune.algorithms.advantages._statistics import centred
from triune.algorithms.credit import credit
from triune.records import Group
from triune.registry import brick


@brick("advantage", "opmd")
@dataclass(frozen=True, kw_only=True)
class OPMDAdvantage:
    """Credit each rollout with its reward minus the (estimated) log-partition of the mirror step.

    The step's optimum is p(y) proportional to old(y) exp(r(y) / tau), whose normaliser is tau log E exp(r / tau). The
    group estimates it by `log_avg_exp`: tau log mean exp(r / tau); `mean` is its limit for a large tau, and what is
    used most. By Jensen the former is never smaller, so its advantages sum to 0 or less. As a baseline that contains
    the rollout itself, either scales the gradient, (G - 1) / G for `mean`; a flat group gets exactly 0.

    Source: arXiv:2509.24203 (OPMD as a regularised REINFORCE); Kimi k1.5, arXiv:2501.12599.

    Attributes:
        baseline: The mean reward, or the log of the mean exponential.
        tau: Strength of the pull towards the old policy, in the unit of the reward; read by `log_avg_exp` alone, the
            loss has its own.
    """

    baseline: Literal["mean", "log_avg_exp"] = "mean"
    tau: Annotated[float, Field(gt=0)] = 1.0
    where: ClassVar[str] = "pipeline"
    least_group: ClassVar[int] = 2

    def __call__(self, group: Group) -> Group:
        """Subtract the baseline."""
        rewards = group.rewards.tolist()
        if self.baseline == "mean" or len(set(rewards)) <= 1:
            return credit(group, centred(rewards))
        found = self.log_avg_exp(rewards)
        return credit(group, [reward - found for reward in rewards])

    def log_avg_exp(self, rewards: Sequence[float]) -> float:
        """Tau log mean exp(r / tau)."""
        top = max(rewards)
        mean = math.fsum(math.exp((reward - top) / self.tau) for reward in rewards) / len(rewards)
        return top + self.tau * math.log(mean)
