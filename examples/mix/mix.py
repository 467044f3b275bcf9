"""MIX in three small classes: learn from your own attempts and from an expert's answers, in one batch and one loss.

Run it with `triune run examples/mix/mix.yaml`; `docs/howto/mix.md` goes through it.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from triune.algorithms import Algorithm, whole_shares
from triune.algorithms.advantages.grpo import GRPOAdvantage
from triune.algorithms.policy_losses.ppo_clip import PPOClip
from triune.algorithms.policy_losses.sft import SFT
from triune.registry import brick, brick_field


@brick("sampling")
@dataclass(frozen=True, kw_only=True)
class FreshAndExpert:
    """Fill every step from two buffers: what was just sampled, and what the expert wrote."""

    expert_ratio: float = 0.25
    buffers: ClassVar[tuple[str, ...]] = ("main", "expert")

    @property
    def fresh_ratio(self):
        return 1 - self.expert_ratio

    async def __call__(self, buffer, num, *, step=0, max_staleness=None, ahead=None):
        num_fresh, num_expert = whole_shares((self.fresh_ratio, self.expert_ratio), num, step)
        fresh = await buffer.lease(num_fresh, max_staleness=max_staleness, ahead=ahead)
        return fresh and fresh + await buffer.lease(num_expert, buffer="expert")


@brick("policy_loss")
@dataclass(frozen=True, kw_only=True)
class ReinforceAndImitate:
    """(1 - mu) x GRPO's loss on sampled tokens + mu x the mean of -log p over the expert's."""

    mu: float = 0.1
    grpo: Any = brick_field("policy_loss", PPOClip())
    sft: Any = brick_field("policy_loss", SFT())
    needs: ClassVar[frozenset[str]] = frozenset({"advantages"})

    def __call__(self, batch, state, progress):
        grpo = self.grpo(batch.not_made_by("expert"), state, progress)
        sft = self.sft(batch.made_by("expert"), state, progress)
        return [
            *(replace(term, weight=term.weight * (1 - self.mu)) for term in grpo),
            *(replace(term, weight=term.weight * self.mu, name="sft_loss") for term in sft),
        ]


@brick("algorithm")
@dataclass(frozen=True, kw_only=True)
class MyMix(Algorithm):
    """GRPO and supervised fine-tuning in one."""

    advantage: Any = brick_field("advantage", GRPOAdvantage())
    policy_loss: Any = brick_field("policy_loss", ReinforceAndImitate())
    sampling: Any = brick_field("sampling", FreshAndExpert())
