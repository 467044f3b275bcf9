"""A teacher's opinion of every token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from pydantic import Field

from triune.algorithms.advantages._statistics import centred
from triune.algorithms.credit import credit
from triune.records import Group
from triune.registry import brick

if TYPE_CHECKING:
    from torch import Tensor

    from triune.algorithms.divider import AllSum
    from triune.algorithms.micro_batch import MicroBatch


@brick("advantage", "on_policy_distill")
@dataclass(frozen=True, kw_only=True)
class OnPolicyDistill:
    """Credit each sampled token with how much likelier the teacher finds it than the policy: log(teacher / old).

    Its mean over samples of the policy is minus the reverse KL to the teacher: distillation as RL with a dense reward,
    which needs the teacher's log-prob of the sampled token alone. With `discount: 0` the expected gradient is that of
    the KL of each next token, prefixes taken as they come; with 1 a token answers for the rest of its sequence, and it
    is that of the KL of whole sequences, with more variance.

    `extrapolation` lambda goes beyond the teacher: lambda log(teacher / reference) - log(old / reference), whose
    optimum is reference x (teacher / reference)^lambda. `coefficient` multiplies all of it and is, alone, a learning
    rate; it matters beside `task_weight`, which adds the rollout's reward minus its group's mean.

    Source: GKD, arXiv:2306.13649; reward extrapolation, arXiv:2602.12125; "On-policy distillation",
    Thinking Machines 2025.

    Attributes:
        coefficient: Factor of the teacher's opinion.
        extrapolation: Factor of log(teacher / reference); 1 = imitate the teacher, and no reference is needed.
        discount: Factor per trained token for what later tokens are worth.
        task_weight: Factor of the task's reward minus the group's mean; 0 = the teacher alone.
    """

    coefficient: Annotated[float, Field(gt=0)] = 1.0
    extrapolation: Annotated[float, Field(ge=0)] = 1.0
    discount: Annotated[float, Field(ge=0, le=1)] = 0.0
    task_weight: Annotated[float, Field(ge=0)] = 0.0
    where: ClassVar[str] = "trainer"

    @property
    def needs(self) -> frozenset[str]:
        """Log-probs of the policy and the teacher, and of the reference when extrapolating."""
        return frozenset(
            {"old_logprobs", "teacher_logprobs"} | ({"ref_logprobs"} if self.extrapolation != 1 else set())
        )

    @property
    def least_group(self) -> int:
        """Rollouts are compared only where the task's reward counts."""
        return 2 if self.task_weight else 1

    def __call__(self, group: Group) -> Group:
        """Note the task's part; the teacher alone takes rollouts without a reward, too."""
        if self.task_weight:
            return credit(group, [self.task_weight * value for value in centred(group.rewards.tolist())])
        return group.map(lambda row: row.with_streams(advantages=np.zeros(len(row), np.float32)))

    def over_batch(
        self, batches: Sequence[MicroBatch], all_sum: AllSum, num_rollouts: int
    ) -> list[Mapping[str, Tensor]]:
        """Add the teacher's part."""
        from triune.algorithms.advantages._batch import returns_to_go

        found = []
        for batch in batches:
            reward = batch.teacher_logprobs - batch.stream("old_logprobs")
            if self.extrapolation != 1:
                reward = reward + (self.extrapolation - 1) * (batch.teacher_logprobs - batch.ref_logprobs)
            taught = self.coefficient * returns_to_go(batch, reward, None, self.discount)
            found.append({"advantages": (batch.advantages + taught).float()})
        return found
