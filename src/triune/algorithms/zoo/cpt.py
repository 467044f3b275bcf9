"""Continued pre-training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field

from triune.algorithms.algorithm import Algorithm
from triune.algorithms.policy_losses.sft import SFT as SFTLoss
from triune.registry import brick, brick_field


@brick("algorithm")
@dataclass(frozen=True, kw_only=True)
class CPT(Algorithm):
    """Go on with pre-training on plain text: every token but a text's first is trained.

    Rows hold `text`. It is encoded with the special tokens that the tokenizer gives plain text, and an end token.

    Source: domain-adaptive pre-training, arXiv:2004.10964.

    Attributes:
        max_tokens: Longer texts are cut into pieces of so many tokens; each begins with the last token of the one
            before, so that no token is lost. null = as long as the model's positions allow.
    """

    policy_loss: Any = brick_field("policy_loss", SFTLoss())
    group_size: int = 1
    max_tokens: Annotated[int, Field(ge=2)] | None = None
    reads: ClassVar[str] = "texts"  # type: ignore[misc]
