"""What n samples per task say about k samples, and how sure one can be of a mean over tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Z_95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Probability that at least one of k samples drawn without replacement out of n passes: 1 - C(n-c, k) / C(n, k).

    Unbiased for the chance that k fresh samples hold a right one; `1 - (1 - c/n)^k` is not, it is too small.

    Args:
        num_samples: n, at least k.
        num_passed: c, how many of them passed.
        k: How many tries are allowed.

    Source: Chen et al., arXiv:2107.03374, equation 1.
    """
    assert 1 <= k <= num_samples, f"pass@{k} of {num_samples} samples"
    assert 0 <= num_passed <= num_samples, f"{num_passed} of {num_samples} samples passed"
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """Expected largest reward among k samples drawn without replacement: pass@k for rewards of any value.

    The i-th smallest of n rewards (from 1) is the largest of a draw in C(i-1, k-1) of the C(n, k) draws.

    Args:
        rewards: One per sample, at least k.
        k: How many tries are allowed.
    """
    assert 1 <= k <= len(rewards), f"best@{k} of {len(rewards)} samples"
    draws = math.comb(len(rewards), k)
    return sum(
        reward * (math.comb(smaller, k - 1) / draws)
        for smaller, reward in enumerate(sorted(rewards))
        if smaller >= k - 1
    )


def wilson_interval(num_passed: int, num_tasks: int) -> tuple[float, float]:
    """95 % interval of a share of tasks; unlike the normal one it stays in [0, 1] and is right near its ends.

    Source: Wilson, J. Am. Stat. Assoc. 22 (1927).
    """
    share, z2 = num_passed / num_tasks, Z_95**2
    centre = (share + z2 / (2 * num_tasks)) / (1 + z2 / num_tasks)
    half = Z_95 / (1 + z2 / num_tasks) * math.sqrt(share * (1 - share) / num_tasks + z2 / (4 * num_tasks**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap_interval(values: Sequence[float], *, seed: int = 0, num_draws: int = 1000) -> tuple[float, float]:
    """95 % percentile interval of a mean over tasks, by drawing tasks with replacement.

    Tasks are drawn, not samples: samples of one task are alike, and counting them singly would promise too much.
    """
    rng = np.random.default_rng(seed)
    array = np.asarray(values, dtype=np.float64)
    means = [array[rng.integers(len(array), size=len(array))].mean() for _ in range(num_draws)]
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def mean_interval(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """95 % interval of a mean over tasks: Wilson's where each value is 0 or 1, else by bootstrap."""
    if all(value in (0.0, 1.0) for value in values):
        return wilson_interval(int(sum(values)), len(values))
    return bootstrap_interval(values, seed=seed)


def tries_up_to(num_samples: int) -> list[int]:
    """The k worth reporting: 1, 2, 4, …, and n itself."""
    powers = [2**exponent for exponent in range(num_samples.bit_length()) if 2**exponent < num_samples]
    return [*powers, num_samples]
