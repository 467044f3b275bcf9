"""Generalised Jensen-Shannon distillation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from triune.registry import brick

if TYPE_CHECKING:
    from torch import Tensor

    from triune.algorithms.divider import AllSum
    from triune.algorithms.micro_batch import MicroBatch


@brick("advantage", "jsd")
@dataclass(frozen=True, kw_only=True)
class JSDAdvantage:
    """Credit each sampled token so that the policy descends a Jensen-Shannon divergence to the teacher.

    With teacher P, policy Q and mixture M = beta P + (1 - beta) Q, the divergence is D = beta KL(P | M) + (1 - beta)
    KL(Q | M). Its gradient is (1 - beta) E[log(Q / M) grad log Q] over the policy's samples, so one sampled token gives

        A = log(M / Q) / beta = log(1 - beta + beta P / Q) / beta

    whose expected gradient is exactly that of -D / (beta (1 - beta)), per token and given the prefix. The mean of A is
    *not* the divergence: it is -KL(Q | M) / beta, the half that the policy's samples can see.

    D itself is 0 at both ends. The division restores them: beta 1 is the reverse KL (`on_policy_distill`: log P / Q,
    seeks one mode, unbounded below), beta 0 the forward KL (P / Q - 1, covers all modes, unbounded above, of high
    variance). Below 1 no token is blamed by more than -log(1 - beta) / beta. Near the teacher all betas agree.

    Source: GKD, arXiv:2306.13649, its generalised JSD.

    Attributes:
        beta: Share of the teacher in the mixture.
        coefficient: Factor; alone, a learning rate.
    """

    beta: Annotated[float, Field(ge=0, le=1)] = 0.5
    coefficient: Annotated[float, Field(gt=0)] = 1.0
    where: ClassVar[str] = "trainer"
    needs: ClassVar[frozenset[str]] = frozenset({"old_logprobs", "teacher_logprobs"})

    def over_batch(
        self, batches: Sequence[MicroBatch], all_sum: AllSum, num_rollouts: int
    ) -> list[Mapping[str, Tensor]]:
        """Compare teacher and policy token by token."""
        found = []
        for batch in batches:
            value = self.coefficient * self.value((batch.teacher_logprobs - batch.stream("old_logprobs")).double())
            found.append({"advantages": value.where(batch.action_mask, 0.0).float()})
        return found

    def value(self, log_ratio: Tensor) -> Tensor:
        """Advantage at log(teacher / policy)."""
        if self.beta == 0:
            return log_ratio.expm1()
        own = log_ratio.new_tensor(math.log1p(-self.beta) if self.beta < 1 else -math.inf)
        return own.logaddexp(math.log(self.beta) + log_ratio) / self.beta
