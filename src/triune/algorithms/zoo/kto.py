"""Kahneman-Tversky optimisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triune.algorithms.algorithm import Algorithm
from triune.algorithms.policy_losses.kto import KTO as KTOLoss
from triune.registry import brick, brick_field


@brick("algorithm")
@dataclass(frozen=True, kw_only=True)
class KTO(Algorithm):
    """Learn from thumbs up and down: single answers, each called desirable or not, no pairs needed.

    Rows hold a question and an answer (as for `sft`; `prompt` may stand for the question) and a true or false `label`.

    Source: arXiv:2402.01306.
    """

    policy_loss: Any = brick_field("policy_loss", KTOLoss())
    group_size: int = 1
