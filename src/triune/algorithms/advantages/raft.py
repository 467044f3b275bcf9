"""Keep good rollouts, and nothing of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from triune.algorithms.credit import credit
from triune.records import Group
from triune.registry import brick


@brick("advantage", "raft")
@dataclass(frozen=True, kw_only=True)
class RaftAdvantage:
    """Credit every rollout that is kept with 1, and leave the others out of the batch.

    Left out, not credited with 0: the mean over tokens is then that of fine-tuning on the kept answers. On samples of
    the policy the expected gradient of -log p over what is kept is that of -log P(kept): for a binary reward, of the
    logarithm of the success rate. A group without a rollout to keep is dropped, and its slot is refunded: the explorer
    makes another one.

    Source: RAFT, arXiv:2304.06767, algorithm 1; keeping all that succeed: arXiv:2504.11343.

    Attributes:
        above: Keep rollouts whose reward is above this; null = any.
        best: Of those keep at most so many, best first, earlier ones first where rewards are equal; null = all.
    """

    above: float | None = 0.0
    best: Annotated[int, Field(ge=1)] | None = None
    where: ClassVar[str] = "pipeline"

    def __call__(self, group: Group) -> Group:
        """Keep, and credit with 1."""
        rewards = dict(zip(group.valid_members, group.rewards.tolist(), strict=True))
        good = [member for member, reward in rewards.items() if self.above is None or reward > self.above]
        kept = sorted(good, key=lambda member: -rewards[member])[: self.best]
        rows = [row for row in group.experiences if row.member in kept and row.member in rewards]
        return credit(group.with_records(rows), [1.0] * len(kept))
