"""PPO's clip for asynchronous training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from triune.algorithms.policy_losses._surrogate import above_behaviour, with_weight
from triune.algorithms.policy_losses.ppo_clip import PPOClip
from triune.algorithms.progress import Progress
from triune.algorithms.terms import Term, metric
from triune.registry import brick

if TYPE_CHECKING:
    from triune.algorithms.micro_batch import MicroBatch


@brick("policy_loss")
@dataclass(frozen=True, kw_only=True)
class DecoupledPPO(PPOClip):
    """Clip around the policy that began the step, and correct for the one that sampled by a truncated weight.

    Stale samples come from an older policy. Clipping around that one would hold the policy back at it; here the centre
    of the clip is `old`, recomputed whenever a step begins, and the loss of `ppo_clip` is multiplied by
    min(exp(old - behaviour), cap), batch data without gradient. Samples are stale also where a version serves several
    steps, entries are used again, or another run made them; where none are, use `ppo_clip`, which is the same then and
    spares the pass. `corrected` offers other corrections for any loss.

    Where the new policy is the old one, the expected gradient given the prefix is the policy gradient also on stale
    samples, up to the cap, which makes it biased and bounds its variance.

    Source: decoupled objective, arXiv:2110.00641; AReaL, arXiv:2505.24298, section 5.2.

    Attributes:
        cap: Largest weight.
    """

    cap: Annotated[float, Field(gt=0)] = 5.0
    needs: ClassVar[frozenset[str]] = frozenset({"advantages", "old_logprobs"})
    is_decoupled: ClassVar[bool] = True

    def __call__(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """Yield what `ppo_clip` yields, and the metrics `behaviour_weight` and `behaviour_bound_ratio`."""
        ratio, known = above_behaviour(batch, batch.old_logprobs).exp(), batch.known_behaviour
        weight = ratio.clamp(max=self.cap)
        return [
            *super().__call__(with_weight(batch, weight), state, progress),
            metric("behaviour_weight", weight, known),
            metric("behaviour_bound_ratio", (ratio > self.cap).to(ratio.dtype), known),
        ]
