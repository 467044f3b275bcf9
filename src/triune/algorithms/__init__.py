"""Algorithms as bricks: terms, the one place that divides, and the zoo. torch is loaded with the first micro-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triune.algorithms.algorithm import Algorithm
from triune.algorithms.credit import credit
from triune.algorithms.progress import Progress
from triune.algorithms.shares import whole_shares
from triune.algorithms.terms import Average, Constant, Term, averaged, check_average, metric

if TYPE_CHECKING:
    from triune.algorithms.divider import AllSum, Divider, count_units, divide_terms, sum_units
    from triune.algorithms.micro_batch import SOURCES, MicroBatch
    from triune.algorithms.rollouts import rollout_values

_LAZY = {
    "AllSum": "divider",
    "Divider": "divider",
    "count_units": "divider",
    "divide_terms": "divider",
    "sum_units": "divider",
    "MicroBatch": "micro_batch",
    "SOURCES": "micro_batch",
    "rollout_values": "rollouts",
}

__all__ = [
    "SOURCES",
    "Algorithm",
    "AllSum",
    "Average",
    "Constant",
    "Divider",
    "MicroBatch",
    "Progress",
    "Term",
    "averaged",
    "check_average",
    "count_units",
    "credit",
    "divide_terms",
    "metric",
    "rollout_values",
    "sum_units",
    "whole_shares",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
