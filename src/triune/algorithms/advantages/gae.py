"""Generalised advantage estimation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from triune.registry import brick

if TYPE_CHECKING:
    from torch import Tensor

    from triune.algorithms.divider import AllSum
    from triune.algorithms.micro_batch import MicroBatch


@brick("advantage", "gae")
@dataclass(frozen=True, kw_only=True)
class GAE:
    """Credit each token with how much better things went than the critic expected before it.

    A_t = sum over k of (gamma lam)^k delta_{t+k}, delta_t = r_t + gamma v_{t+1} - v_t, over action tokens only: what
    tools and users say between turns is skipped, so the next action token is the successor. r_t is what the rollout was
    given at that token (turn rewards, a KL penalty), and at the last one the rest of its reward. Returns for the critic
    are A_t + v_t, before whitening.

    With gamma = lam = 1 A_t is the reward still to come minus the value, without bias whatever the critic says; a
    smaller `lam` trusts the critic, for less variance and a bias as large as its errors. Whitening subtracts the mean
    over all tokens, a constant, and divides by the deviation: the expected gradient keeps its direction.

    Every experience of a rollout is an episode that ends with the rollout's reward. Branches need not follow one
    another (agents side by side, a context that was rewritten), and with gamma = lam = 1 a chain of them gets the same.

    A rollout that was cut off (for length, turns or time) lost a future. `truncated: bootstrap` adds gamma times a
    value in its stead; that after the last token is not computed, so the one before it stands for it. A rollout without
    a reward, and an answer that an expert wrote, get advantage 0 and no return.

    Source: arXiv:1506.02438, eq. 16; in PPO: arXiv:1707.06347, eq. 11; lam = 1 for long answers: arXiv:2503.01491.

    Attributes:
        gamma: Worth of a reward one token later.
        lam: Worth of the next token's surprise; 0 = one step, 1 = to the end.
        whiten: Whether the step's advantages get mean 0 and deviation 1.
        truncated: What follows a rollout that was cut off: nothing (`end`), or what the critic expected.
        epsilon: Added to the deviation.
    """

    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    lam: Annotated[float, Field(ge=0, le=1)] = 1.0
    whiten: bool = True
    truncated: Literal["end", "bootstrap"] = "end"
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    where: ClassVar[str] = "trainer"
    takes_token_rewards: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[str]:
        """Values, and which sequences were cut off where that matters."""
        return frozenset({"values", "truncated"} if self.truncated == "bootstrap" else {"values"})

    def over_batch(
        self, batches: Sequence[MicroBatch], all_sum: AllSum, num_rollouts: int
    ) -> list[Mapping[str, Tensor]]:
        """Make `advantages` and `returns` of every micro-batch; a return is NaN where the reward is unknown."""
        from triune.algorithms.advantages._batch import whitened

        found = [self._advantages(batch) for batch in batches]
        streams = []
        for batch, value in zip(batches, found, strict=True):
            known = batch.action_mask & ~value.isnan()
            streams.append({"advantages": value.where(known, 0.0).float(), "returns": (value + batch.values).float()})
        if self.whiten:
            options = {"over": "tokens", "epsilon": self.epsilon, "all_sum": all_sum, "num_rollouts": num_rollouts}
            for stream, value in zip(streams, whitened(batches, found, **options), strict=True):
                stream["advantages"] = value
        return streams

    def _advantages(self, batch: MicroBatch) -> Tensor:
        """float64[B, T], NaN where the reward is unknown."""
        import torch

        from triune.algorithms.advantages._batch import returns_to_go

        mask = batch.action_mask
        owner = batch.spread(torch.arange(batch.num_sequences, device=mask.device))[mask]  # of each action token
        is_last = owner != owner.roll(-1)
        is_last[-1:] = True
        values = batch.values[mask].double()
        rewards = batch.sampled_rewards.double()[owner].where(is_last, 0.0)
        if "token_rewards" in batch.streams:
            rewards = rewards + batch.streams["token_rewards"][mask]
        after = values.roll(-1).where(~is_last, 0.0)
        if self.truncated == "bootstrap":
            after = values.where(is_last & (batch.stream("truncated")[mask] > 0), after)
        surprise = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
        surprise[mask] = rewards + self.gamma * after - values
        return returns_to_go(batch, surprise, None, self.gamma * self.lam)
