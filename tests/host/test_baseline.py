"""What is usual of a series, and how far a value lies from it."""

from __future__ import annotations

import numpy as np
import pytest

from nnx_probes.host.baseline import baseline, shift

LIMITS = dict(z=6.0, ratio=3.0, jump=100.0)


def spread(s, n=128, middle=1.0):
    """A series whose logarithms lie `s` above and below the middle in turn: its median absolute deviation is `s`."""
    return middle * np.exp(np.resize([s, -s], n))


# --- baseline -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("middle", [1e-12, 0.24, 1.0, 1e9])
def test_the_median_and_the_spread_are_those_of_the_logarithms(middle):
    found = baseline(spread(0.2, middle=middle), **LIMITS)
    assert found.median == pytest.approx(middle) and found.sigma == pytest.approx(1.4826 * 0.2)
    assert found.ratio(3 * middle) == pytest.approx(3)
    assert found.z(middle * np.exp(0.29652)) == pytest.approx(1) and found.z(middle / 2) < 0 and found.z(0.0) == -np.inf


def test_a_normal_series_of_logarithms_gets_its_standard_deviation():
    logs = np.random.default_rng(0).normal(0.5, 0.3, 128)
    found = baseline(np.exp(logs), **LIMITS)
    assert found.median == pytest.approx(np.exp(np.median(logs))) and found.sigma == pytest.approx(0.3, rel=0.25)


def test_a_heavy_upper_tail_is_a_wide_spread():
    """Two of a hundred values decide: the 98th percentile of a normal distribution lies 2.05 sigmas above its median."""
    values = spread(0.1, 128)
    values[:12:2] = np.exp(0.8)
    assert baseline(values, **LIMITS).sigma == pytest.approx(0.8 / 2.054, rel=1e-3)
    values = spread(0.1, 128)
    values[1:12:2] = np.exp(-0.8)
    assert baseline(values, **LIMITS).sigma == pytest.approx(1.4826 * 0.1)
    assert baseline(np.append(spread(0.1, 128), np.exp(0.8)), **LIMITS).sigma == pytest.approx(1.4826 * 0.1)


def test_a_constant_series_has_the_least_spread():
    assert baseline(np.full(64, 2.0), **LIMITS).sigma == 1e-3


@pytest.mark.parametrize(("n", "enough"), [(0, False), (63, False), (64, True)])
def test_fewer_than_sixty_four_values_are_no_baseline(n, enough):
    assert (baseline(spread(0.1, n), **LIMITS) is not None) is enough


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 0.0, -1.0])
def test_values_that_are_no_positive_numbers_are_not_accepted(bad):
    good = spread(0.2, 64)
    mixed = np.insert(good, np.arange(0, 64, 2), bad)
    assert baseline(mixed, **LIMITS) == baseline(good, **LIMITS)
    assert baseline(np.append(good[:63], [bad] * 10), **LIMITS) is None


@pytest.mark.parametrize("outlier", [4.0, 50.0, 1e30])
def test_values_that_would_be_flagged_are_not_accepted(outlier):
    good = np.exp(np.random.default_rng(0).normal(0, 0.1, 70))
    assert baseline(np.append(good, outlier), **LIMITS) == baseline(good, **LIMITS)
    assert baseline(np.append(good[:63], outlier), **LIMITS) is None


@pytest.mark.parametrize(
    ("limits", "accepted"),
    [
        (LIMITS, False),
        (dict(z=6.0, ratio=4.5, jump=100.0), True),
        (dict(z=14.0, ratio=3.0, jump=100.0), True),
        (dict(z=14.0, ratio=4.5, jump=3.5), False),
    ],
)
def test_a_value_is_flagged_by_z_and_ratio_together_or_by_the_jump(limits, accepted):
    series = np.append(spread(0.08, 63), 4.0)  # z = 11 and ratio = 3.7 against the median of all
    assert (baseline(series, **limits) is not None) is accepted


def test_low_values_are_accepted():
    assert baseline(np.append(spread(0.08, 63), 1e-6), **LIMITS) is not None


def test_the_last_hundred_and_twenty_eight_accepted_values_count():
    old, recent = np.full(500, 1.5), spread(0.1, 128)
    assert baseline(np.append(old, recent), **LIMITS) == baseline(recent, **LIMITS)
    assert baseline(np.append(old, recent[:60]), **LIMITS).median == pytest.approx(1.5)


def test_a_level_that_stays_becomes_the_usual_one():
    series = np.append(np.full(300, 1.0), np.full(200, 10.0))
    assert baseline(series, **LIMITS).median == pytest.approx(10.0)


# --- shift --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "enough"), [(79, False), (80, True)])
def test_a_shift_needs_sixty_four_and_sixteen_values(n, enough):
    assert (shift(np.ones(n)) is not None) is enough


@pytest.mark.parametrize(("n", "recent", "enough"), [(67, 4, False), (68, 4, True)])
def test_the_recent_stretch_may_be_chosen(n, recent, enough):
    assert (shift(np.ones(n), recent=recent) is not None) is enough


@pytest.mark.parametrize("times", [2.0, 3.0, 1e6])
def test_a_shift_compares_the_recent_median_with_the_best_median(times):
    worse, best = np.full(100, 50.0), np.exp(np.resize([0.2, -0.2] * 15 + [0, 0], 96))
    rise, sigma = shift(np.concatenate([worse, best, np.full(100, 20.0), np.full(16, times)]))
    assert rise == pytest.approx(np.log(times)) and sigma == pytest.approx(1.4826 * 0.2)


@pytest.mark.parametrize(("high", "rises"), [(7, 0.0), (8, 0.5), (9, 1.0)])
def test_the_recent_median_moves_with_the_ninth_of_sixteen_values(high, rises):
    rise, _ = shift(np.append(np.ones(120), np.full(high, 4.0)))
    assert rise == pytest.approx(rises * np.log(4))


def test_a_falling_series_has_no_rise():
    rise, _ = shift(np.geomspace(100, 1, 500))
    assert rise < 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0, -2.0])
def test_a_shift_passes_over_values_that_are_no_positive_numbers(bad):
    good = np.append(spread(0.2, 100), np.full(16, 3.0))
    assert shift(np.insert(good, 50, [bad] * 5)) == shift(good)


def test_a_constant_series_shifts_by_nothing_with_the_least_spread():
    assert shift(np.full(100, 3.0)) == (0.0, 1e-3)
