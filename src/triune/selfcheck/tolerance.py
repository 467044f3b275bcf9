"""How far two right ways of computing the same number may be apart, and how to compute without rounding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from triune.models import has_fast_bfloat16, set_float32_matmul

if TYPE_CHECKING:
    from triune.trainer import Policy


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Bounds for this model on this machine.

    Attributes:
        is_reduced: Whether products are made with fewer bits than float32 has.
        logprob: Mean absolute difference of log-probs between sampler and trainer, nats per token.
        ratio: Distance of the mean probability ratio from 1.
        clip: Share of tokens outside the clip on an unmodified policy.
        gradient: Norm of the difference of two gradients, as a share of the gradient.
    """

    is_reduced: bool
    logprob: float
    ratio: float
    clip: float
    gradient: float

    @classmethod
    def of(cls, policy: Policy, served: str, float32_matmul: str) -> Tolerance:
        """For a policy and the dtype its versions are served in."""
        is_lower = float32_matmul != "highest" and (policy.device.type != "cpu" or has_fast_bfloat16())
        if str(policy.dtype) == "torch.float32" and served == "float32" and not is_lower:
            return cls(is_reduced=False, logprob=1e-3, ratio=1e-3, clip=0.0, gradient=5e-3)
        return cls(is_reduced=True, logprob=0.1, ratio=0.05, clip=0.05, gradient=0.25)

    @property
    def name(self) -> str:
        """For messages."""
        return "reduced precision" if self.is_reduced else "float32"


@contextmanager
def exact(policy: Policy, float32_matmul: Any) -> Iterator[float]:
    """Inside, the policy computes in full float32 where its weights have that, so that rounding hides nothing.

    Args:
        policy: Whose precision is changed, on the lane.
        float32_matmul: What the process goes back to.

    Yields:
        Mean difference of log-probs that is then allowed between two layouts, nats per token.
    """
    kept = policy.has_autocast, policy.dtype
    masters = next(iter(policy.model.parameters())).dtype
    policy.has_autocast, policy.dtype = False, masters
    set_float32_matmul("highest")
    try:
        yield 2e-4 if str(masters) == "torch.float32" else 0.1
    finally:
        policy.has_autocast, policy.dtype = kept
        set_float32_matmul(float32_matmul)
