"""What losses share that reinforce what was sampled and imitate what an expert wrote."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from triune.algorithms.policy_losses.ppo_clip import PPOClip
from triune.algorithms.policy_losses.sft import SFT
from triune.algorithms.progress import Progress
from triune.algorithms.terms import Term
from triune.errors import ConfigError
from triune.records import Source
from triune.registry import brick_field

if TYPE_CHECKING:
    from triune.algorithms.micro_batch import MicroBatch


@dataclass(frozen=True, kw_only=True)
class Mixed(ABC):
    """(1 - mu) x rl + mu x imitation, each a loss of its own, averaged over its own tokens.

    Whatever the parts are, a token is in one of them: those of the sources that `imitation` names (the expert's when it
    names none) are imitated, all others are for `rl`.

    Attributes:
        rl: Loss on what the policy sampled.
        imitation: Loss on the expert's tokens.
    """

    rl: Any = brick_field("policy_loss", PPOClip())
    imitation: Any = brick_field("policy_loss", SFT(sources=(Source.EXPERT,)))
    variants: ClassVar[tuple[Mapping[str, Any], ...]] = ({"rl": "reinforce"}, {"rl": "opmd"}, {"imitation": "sft"})

    @abstractmethod
    def mu_at(self, progress: Progress) -> float:
        """Weight of imitation in this step."""

    @property
    def experts(self) -> tuple[str, ...]:
        """Sources whose tokens are imitated."""
        return tuple(getattr(self.imitation, "sources", ())) or (Source.EXPERT,)

    @property
    def needs(self) -> frozenset[str]:
        """What both parts need."""
        return self.rl.needs | self.imitation.needs

    @property
    def is_decoupled(self) -> bool:
        """As the loss on what was sampled says."""
        return getattr(self.rl, "is_decoupled", False)

    @property
    def least_group(self) -> int:
        """As the loss on what was sampled says."""
        return getattr(self.rl, "least_group", 1)

    def __call__(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """Yield the terms of both parts, the expert's as `sft_loss`."""
        mu = self.mu_at(progress)
        rl = self.rl(batch.not_made_by(*self.experts), state, progress)
        imitation = self.imitation(batch.made_by(*self.experts), {}, progress)
        return [
            *(replace(term, weight=term.weight * (1 - mu)) for term in rl),
            *(replace(term, weight=term.weight * mu, name=_of_expert(term.name)) for term in imitation),
        ]

    def state0(self) -> dict[str, Any]:
        """That of the loss on what was sampled."""
        return getattr(self.rl, "state0", dict)()

    def update(self, state: dict[str, Any], stats: Mapping[str, float]) -> dict[str, Any]:
        """Likewise."""
        return getattr(self.rl, "update", lambda old, _: old)(state, stats)

    def check(self, where: str) -> None:
        """Raise ConfigError when the fields of a part do not fit, or nothing would be imitated."""
        for name in ("rl", "imitation"):
            getattr(getattr(self, name), "check", lambda where: None)(f"{where}.{name}")
        if reason := self._no_imitation():
            name = getattr(self.imitation, "__brick__", (None, type(self.imitation).__name__))[1]
            found, do = f"found {name}, which {reason}", "write `imitation: {use: sft}`"
            raise ConfigError(f"{where}.imitation", found, "a loss that raises log-probs of given answers", do)
        if Source.POLICY in self.experts:
            found = f"found [{', '.join(self.experts)}], and what the policy sampled is for `rl`"
            raise ConfigError(f"{where}.imitation.sources", found, "sources of given answers", "write `[expert]`")

    def _no_imitation(self) -> str:
        """Why `imitation` imitates nobody, or ""."""
        if getattr(self.imitation, "unit", "") == "pair":
            return "compares pairs"
        if "advantages" in self.imitation.needs:
            return "follows advantages, and given answers have none"
        return "keeps a state, which a part that imitates has none of" if hasattr(self.imitation, "state0") else ""

    # ------------------------------------------------------------------------- what the generated suite holds them to

    @property
    def expected_gradient(self) -> str:
        """On what was sampled."""
        return self.rl.expected_gradient

    @property
    def expert_gradient(self) -> str:
        """On the expert's tokens."""
        return self.imitation.expected_gradient

    @property
    def gradient_scale(self) -> float:
        """At the first step."""
        return getattr(self.rl, "gradient_scale", 1.0) * (1 - self.mu_at(Progress()))

    @property
    def expert_scale(self) -> float:
        """At the first step."""
        return getattr(self.imitation, "gradient_scale", 1.0) * self.mu_at(Progress())

    @property
    def off_policy(self) -> str:
        """As the loss on what was sampled says."""
        return getattr(self.rl, "off_policy", "")

    @property
    def surrogate(self) -> str:
        """As the parts say."""
        return getattr(self.rl, "surrogate", "") or getattr(self.imitation, "surrogate", "")


def _of_expert(name: str) -> str:
    return "sft_loss" if name == "policy_loss" else f"sft_{name}"
