"""How far two right ways of computing the same number may be apart: decided by what products compute in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from triune.models import has_fast_bfloat16

if TYPE_CHECKING:
    from triune.trainer import Policy


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Bounds for this model on this machine.

    Attributes:
        is_reduced: Whether products are made with fewer bits than float32 has.
        logprob: Mean absolute difference of log-probs between sampler and trainer, nats per token.
        layout: The same between two layouts of the trainer.
        ratio: Distance of the mean probability ratio from 1.
        clip: Share of tokens outside the clip on an unmodified policy.
        gradient: Norm of the difference of two gradients, as a share of the gradient.
    """

    is_reduced: bool
    logprob: float
    layout: float
    ratio: float
    clip: float
    gradient: float

    @classmethod
    def of(cls, policy: Policy, served: str, float32_matmul: str) -> Tolerance:
        """For a policy and the dtype its versions are served in."""
        is_lower = float32_matmul != "highest" and (policy.device.type != "cpu" or has_fast_bfloat16())
        if str(policy.dtype) == "torch.float32" and served == "float32" and not is_lower:
            return cls(is_reduced=False, logprob=1e-3, layout=2e-4, ratio=1e-3, clip=0.0, gradient=5e-3)
        return cls(is_reduced=True, logprob=0.06, layout=0.04, ratio=0.05, clip=0.05, gradient=0.25)

    @property
    def name(self) -> str:
        """For messages."""
        return "reduced precision" if self.is_reduced else "float32"
