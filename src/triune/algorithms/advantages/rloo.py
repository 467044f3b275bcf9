"""Leave-one-out advantages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from triune.algorithms.advantages._statistics import centred
from triune.algorithms.credit import credit
from triune.records import Group
from triune.registry import brick


@brick("advantage", "rloo")
@dataclass(frozen=True, kw_only=True)
class RLOOAdvantage:
    """Credit each rollout with its reward minus the mean of the *other* rollouts of its task.

    A_i = r_i - sum over j != i of r_j / (G - 1) = G / (G - 1) x (r_i - mean). Because the baseline does not contain the
    rollout itself, the expected gradient is exactly the policy gradient; Dr. GRPO's is (G - 1) / G of it. A group
    with one valid rollout has no others and gets 0, as does a flat one.

    Source: RLOO, arXiv:2402.14740.
    """

    where: ClassVar[str] = "pipeline"
    least_group: ClassVar[int] = 2

    def __call__(self, group: Group) -> Group:
        """Subtract the others' mean."""
        found = centred(group.rewards.tolist())
        factor = len(found) / max(len(found) - 1, 1)
        return credit(group, [value * factor for value in found])
