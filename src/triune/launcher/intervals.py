"""Means over a few seeds, and how sure one can be of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

Z_975 = 1.959963984540054
"""Quantile of the normal distribution: what that of t comes to with many seeds."""

T_975 = (
    12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216, 2.22814,
    2.20099, 2.17881, 2.16037, 2.14479, 2.13145, 2.11991, 2.10982, 2.10092, 2.09302, 2.08596,
    2.07961, 2.07387, 2.06866, 2.06390, 2.05954, 2.05553, 2.05183, 2.04841, 2.04523, 2.04227,
)  # fmt: skip
"""0.975 quantile of Student's t with 1, 2, … 30 degrees of freedom."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over seeds.

    Attributes:
        mean: Of the values.
        low: Lower end of the 95 % interval; None with a single value.
        high: Upper end, likewise.
        values: One per seed.
    """

    mean: float
    low: float | None
    high: float | None
    values: tuple[float, ...]


def t_quantile(freedom: int) -> float:
    """0.975 quantile of Student's t; beyond the table by its expansion around the normal one, right to 1e-5.

    Args:
        freedom: Degrees of freedom, at least 1.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    if freedom <= len(T_975):
        return T_975[freedom - 1]
    z, n = Z_975, freedom
    first = (z**3 + z) / (4 * n)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    return z + first + second + third


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean and t-based 95 % interval: mean ± t · s / √n, with s the sample's deviation (n - 1); None without a value.

    It holds for seeds that are independent and roughly normal; with 3 of them t is 4.3, so bands are honestly wide.
    """
    if not values:
        return None
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean=mean, low=None, high=None, values=tuple(values))
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = t_quantile(n - 1) * spread / math.sqrt(n)
    return Estimate(mean=mean, low=mean - half, high=mean + half, values=tuple(values))


def paired(later: Mapping[int, float], earlier: Mapping[int, float]) -> Estimate | None:
    """Estimate of `later - earlier` over the seeds that both have; what a seed does to both cancels."""
    return estimate([later[seed] - earlier[seed] for seed in sorted(later.keys() & earlier.keys())])
