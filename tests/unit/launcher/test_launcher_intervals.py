"""Estimates over seeds, against tables and against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from triune.launcher.comparison import mean_curve
from triune.launcher.intervals import estimate, paired, t_quantile


def probability_below(t: float, freedom: int) -> float:
    """Student's distribution function, by Simpson's rule over its density."""
    x = np.linspace(0.0, t, 20001)
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(freedom * math.pi)
    density = np.exp(log_scale - (freedom + 1) / 2 * np.log1p(x * x / freedom))
    weights = np.ones_like(x)
    weights[1:-1:2], weights[2:-1:2] = 4, 2
    return 0.5 + float(weights @ density) * (x[1] - x[0]) / 3


@pytest.mark.parametrize("freedom", [*range(1, 36), 60, 200, 5000])
def test_the_quantile_of_t_leaves_a_fortieth_above_it(freedom):
    assert probability_below(t_quantile(freedom), freedom) == pytest.approx(0.975, abs=2e-6)


@pytest.mark.parametrize(("freedom", "printed"), [(1, 12.706), (2, 4.303), (9, 2.262), (40, 2.021), (120, 1.980)])
def test_the_quantile_of_t_is_that_of_printed_tables(freedom, printed):
    assert t_quantile(freedom) == pytest.approx(printed, abs=5e-4)


def test_an_interval_is_the_mean_and_t_times_its_standard_error():
    # 1, 2, 6: mean 3, deviation sqrt((4 + 1 + 9) / 2) = 2.645751, error 1.527525, times 4.302653 = 6.572412
    found = estimate([1.0, 2.0, 6.0])
    assert found is not None
    assert (found.mean, found.low, found.high) == pytest.approx((3.0, -3.572412, 9.572412), abs=1e-5)


def test_one_seed_has_a_mean_and_no_interval_and_none_has_nothing():
    one = estimate([0.5])
    assert one is not None
    assert (one.mean, one.low, one.high) == (0.5, None, None)
    assert estimate([]) is None


def test_a_difference_is_paired_by_seed_so_that_what_a_seed_does_to_both_cancels():
    # both jump from seed to seed; the differences are 1, 1, 4: mean 2, error 1, times 4.302653
    earlier, later = {0: 10.0, 1: 50.0, 2: 90.0, 3: 7.0}, {2: 94.0, 1: 51.0, 0: 11.0}
    found = paired(later, earlier)
    assert found is not None
    assert found.values == (1.0, 1.0, 4.0)
    assert (found.mean, found.low, found.high) == pytest.approx((2.0, -2.302653, 6.302653), abs=1e-5)
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_a_mean_curve_is_drawn_where_all_seeds_have_a_value():
    curve = mean_curve([{0: 0.0, 5: 1.0, 10: 2.0}, {0: 2.0, 10: 2.0}])
    assert curve["steps"] == [0, 10]
    assert curve["mean"] == [1.0, 2.0]
    # 0 and 2: error 1, t with one degree of freedom 12.7062
    assert curve["low"] == pytest.approx([1 - 12.7062, 2.0], abs=1e-3)
    assert curve["high"] == pytest.approx([1 + 12.7062, 2.0], abs=1e-3)
    assert mean_curve([]) == {"steps": [], "mean": [], "low": [], "high": []}
