"""Estimators against numbers worked out by counting every case."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest

from triune.evaluation.estimators import (
    best_at_k,
    bootstrap_interval,
    mean_interval,
    pass_at_k,
    tries_up_to,
    wilson_interval,
)
from triune.evaluation.results import SetResult, TaskResult


@pytest.mark.parametrize("num", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_sample(num):
    for passed in range(num + 1):
        samples = [1] * passed + [0] * (num - passed)
        for k in range(1, num + 1):
            draws = list(combinations(samples, k))
            assert pass_at_k(num, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


def test_pass_at_k_is_unbiased_where_the_naive_formula_is_not():
    chance, num, k = 0.3, 6, 3
    weights = [math.comb(num, c) * chance**c * (1 - chance) ** (num - c) for c in range(num + 1)]
    truth = 1 - (1 - chance) ** k
    assert sum(w * pass_at_k(num, c, k) for c, w in enumerate(weights)) == pytest.approx(truth, abs=1e-12)
    assert sum(w * (1 - (1 - c / num) ** k) for c, w in enumerate(weights)) < truth - 0.02


def test_a_reward_that_misses_the_threshold_by_a_rounding_passes_and_one_below_it_does_not():
    tasks = (TaskResult(key="a", rewards=(0.7 + 0.2 + 0.1, 0.99)),)
    found = SetResult(taskset="sums", weight=1.0, samples=2, pass_threshold=1.0, tasks=tasks).metrics()
    assert (0.7 + 0.2 + 0.1 < 1.0, found["pass@1"], found["pass@2"]) == (True, 0.5, 1.0)


def test_every_mean_over_two_tasks_or_more_has_an_interval_and_one_over_a_single_task_has_none():
    def measured(*rewards: tuple[float, ...]) -> dict[str, float]:
        tasks = tuple(TaskResult(key=str(n), rewards=each) for n, each in enumerate(rewards))
        return SetResult(taskset="sums", weight=1.0, samples=2, pass_threshold=1.0, tasks=tasks).metrics()

    found = measured((1.0, 0.0), (1.0, 1.0), (0.0, 0.0))
    for name in ("mean@2", "pass@1", "pass@2", "best@2"):
        assert found[f"{name}/low"] < found[name] < found[f"{name}/high"], name
    assert not [name for name in measured((1.0, 0.0)) if name.endswith(("/low", "/high"))]


def test_best_at_k_is_the_mean_of_the_largest_over_all_draws():
    rewards = [0.5, -1.0, 0.5, 2.0, 0.0, 0.25]
    for k in range(1, 7):
        draws = [max(draw) for draw in combinations(rewards, k)]
        assert best_at_k(rewards, k) == pytest.approx(sum(draws) / len(draws), abs=1e-12)


def test_best_at_k_of_zeros_and_ones_is_pass_at_k():
    for passed in range(6):
        rewards = [1.0] * passed + [0.0] * (5 - passed)
        assert [best_at_k(rewards, k) for k in range(1, 6)] == pytest.approx(
            [pass_at_k(5, passed, k) for k in range(1, 6)]
        )


def test_wilson_interval_has_the_published_values():
    # Brown, Cai, DasGupta 2001 and R's prop.test(correct=FALSE): 0 of 10, 5 of 10, 15 of 148
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson_interval(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson_interval(15, 148) == pytest.approx((0.0624, 0.1605), abs=1e-4)


def test_wilson_interval_covers_the_truth_95_times_in_100_on_average():
    num, coverages = 40, []
    for share in np.linspace(0.05, 0.95, 19):
        inside = [c for c in range(num + 1) if wilson_interval(c, num)[0] <= share <= wilson_interval(c, num)[1]]
        coverages.append(sum(math.comb(num, c) * share**c * (1 - share) ** (num - c) for c in inside))
    assert np.mean(coverages) == pytest.approx(0.95, abs=0.01)


def test_bootstrap_interval_is_about_normal_for_many_tasks_and_the_same_for_one_seed():
    values = np.random.default_rng(0).normal(0.5, 0.2, size=400)
    half = 1.96 * values.std() / 20
    low, high = bootstrap_interval(values.tolist(), seed=3)
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.15 * half)
    assert bootstrap_interval(values.tolist(), seed=3) == (low, high)
    assert mean_interval(values.tolist(), seed=3) == (low, high)
    assert mean_interval([1.0, 0.0, 1.0]) == wilson_interval(2, 3)


def test_reported_k_are_powers_of_two_and_n():
    assert [tries_up_to(n) for n in (1, 2, 3, 4, 6, 8)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4],
        [1, 2, 4, 6],
        [1, 2, 4, 8],
    ]
