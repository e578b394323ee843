"""Formulas about mixing, ages and admission, against enumeration or chi-square with fixed seeds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from forebay.errors import ConfigError
from forebay.flow import mixing
from forebay.flow.admission import Admission, Blocked, check_budget
from forebay.flow.queues import BufferedHSQueue, simulate_draws
from forebay.flow.random import CounterRandom


def test_single_bucket_chance_equals_enumeration() -> None:
    """P(k draws without refill all of one bucket) = sum C(n_b, k) / C(n, k)."""
    counts, k = (4, 3, 1), 3
    items = [b for b, c in enumerate(counts) for _ in range(c)]
    draws = list(itertools.combinations(items, k))
    share = sum(len(set(draw)) == 1 for draw in draws) / len(draws)
    assert mixing.single_bucket_chance(counts, k) == pytest.approx(share)


def test_mean_run_is_that_of_independent_draws() -> None:
    """Mean same-bucket run = 1 / (1 - sum p^2); the share of run ends among 200,000 draws, at 5 sigma."""
    shares = (0.5, 0.3, 0.2)
    rng = np.random.default_rng(0)
    draws = rng.choice(3, size=200_000, p=shares)
    ends = np.count_nonzero(np.diff(draws)) / (len(draws) - 1)
    p = 1 / mixing.mean_run(shares)
    assert abs(ends - p) < 5 * (p * (1 - p) / len(draws)) ** 0.5


def test_r_is_one_for_single_bucket_windows_and_zero_for_independent_draws() -> None:
    one = np.repeat([0, 1, 2, 3], 80)
    assert mixing.excess_of_order(one, 8) == pytest.approx(1.0)
    mixed = np.random.default_rng(1).permutation(np.repeat([0, 1, 2, 3], 20_000))
    assert abs(mixing.excess_of_order(mixed, 8)) < 0.01
    assert mixing.excess_of_order(np.tile([0, 1, 2, 3], 80), 4) < -0.3
    assert mixing.excess_of_order(np.zeros(80, dtype=np.uint8), 8) == 0.0


def test_the_meter_agrees_with_the_formula_of_the_order() -> None:
    """F22: occupancy at draw, not the configured size, is what is reported; G5: r per window."""
    rng = np.random.default_rng(2)
    buckets = rng.permutation(np.repeat([0, 1, 2], [40, 40, 16]))
    meter = mixing.Meter([40, 40, 16], 12)
    for i, window in enumerate(buckets.reshape(-1, 8).tolist()):
        meter.window(window, [i] * 8, 20 + i, 1)
    report = meter.report()
    assert report["r"] == pytest.approx(mixing.excess_of_order(buckets, 8))
    assert report["occupancy_at_draw"] == pytest.approx(20 + 11 / 2)
    assert report["forced_share"] == pytest.approx(1 / 8)
    assert (report["age_p50"], report["age_p99"], report["age_max"]) == (5, 11, 11)
    assert report["windows"] == 12


def test_windows_are_held_against_the_plan_bucket_by_bucket() -> None:
    """G5: what summary.json says of a whole run; the same r as the order's formula."""
    buckets = np.random.default_rng(3).permutation(np.repeat([0, 1, 2], [40, 40, 16]))
    told = mixing.of_windows(buckets.reshape(-1, 8).tolist(), [40, 40, 16], (64, 128, 256))
    assert told["r"] == pytest.approx(mixing.excess_of_order(buckets, 8))
    assert (told["windows"], [b["up_to_tokens"] for b in told["buckets"]]) == (12, [64, 128, 256])
    assert [b["items_per_window"] for b in told["buckets"]] == pytest.approx([40 / 12, 40 / 12, 16 / 12])
    assert [b["share_of_jobs"] for b in told["buckets"]] == pytest.approx([40 / 96, 40 / 96, 16 / 96])
    alone = mixing.of_windows([[0, 0], [1, 1], [0]], [3, 2], (64, 128))
    assert (alone["r"], alone["distinct_buckets"], alone["single_bucket_windows"]) == (pytest.approx(1.0), 1.0, 3)
    assert [b["share_of_windows"] for b in alone["buckets"]] == pytest.approx([2 / 3, 1 / 3])
    assert mixing.of_windows([], [3, 2], (64, 128))["distinct_buckets"] == 0


def test_drift_shows_a_bucket_that_arrives_late() -> None:
    """r does not see a slow bucket whose items come at the end; the mix of the last windows and the ages do."""
    meter = mixing.Meter([80, 80], 20)
    for _ in range(19):
        meter.window([0, 0, 0, 0, 0, 1, 1, 1], [2] * 5 + [9] * 3, 10, 0)
    meter.window([1] * 8, [9] * 8, 10, 0)
    report = meter.report()
    assert report["drift_first"] == pytest.approx(0.125)
    assert report["drift_last"] == pytest.approx(0.5)
    assert report["age_by_bucket"] == pytest.approx([2, 9])


def test_residence_is_geometric_at_constant_occupancy() -> None:
    """Mean residence B draws, so mean age B - 1: 40,000 draws at occupancy 20, 5 sigma of a geometric mean."""
    queue = BufferedHSQueue(CounterRandom(0, 0), min_fill=1)
    for job in range(20):
        queue.put(job, 0)
    ages: list[int] = []
    for t in range(40_000):
        drawn = queue.draw(1, t, False, False, ())
        assert drawn is not None
        ages += drawn.ages
        queue.put(20 + t, 0)
    steady = np.array(ages[2000:])
    sigma = (20 * 19) ** 0.5 / len(steady) ** 0.5
    assert abs(steady.mean() + 1 - mixing.mean_residence(20)) < 5 * sigma * 1.5  # ages of one buffer are correlated


def test_correlated_windows_inflate_the_variance_by_the_formula() -> None:
    """Var(window mean of a bucket effect) = between / G x (1 + (G - 1) r), windows that repeat a bucket at chance c."""
    rng = np.random.default_rng(3)
    size, windows, c = 8, 60_000, 0.4
    effects = np.array([-1.5, -0.5, 0.5, 1.5])
    lead = rng.integers(0, 4, windows)
    follow = rng.random((windows, size)) < c**0.5
    buckets = np.where(follow, lead[:, None], rng.integers(0, 4, (windows, size)))
    r = mixing.excess_of_order(buckets.ravel(), size)
    assert r == pytest.approx(c, abs=0.01)
    inflation = effects[buckets].mean(axis=1).var() / (effects.var() / size)
    assert inflation == pytest.approx(mixing.variance_factor(size, r), rel=0.03)


def test_the_plan_is_warned_about_before_training() -> None:
    """A sorted plan with a small buffer, and a window under 4 items, with the numbers."""
    buckets = np.repeat([0, 1, 2, 3], 100)
    (line,) = mixing.warnings_of_plan(buckets, "sorted", 8, 10)
    assert "r = 0.9" in line
    assert "min_fill 10 of 400 jobs" in line
    mixed = np.random.default_rng(0).permutation(buckets)
    assert mixing.warnings_of_plan(mixed, "shuffled", 8, 10) == []
    (line,) = mixing.warnings_of_plan(mixed, "shuffled", 2, 10)
    assert "window 2 is below 4" in line
    large = np.repeat([0, 1, 2, 3], 40_000)
    assert "r = 1.00" in mixing.warnings_of_plan(large, "sorted", 8, 10)[0]
    assert "of 160000 jobs" in mixing.warnings_of_plan(large, "sorted", 8, 10)[0]


def test_a_large_min_fill_mixes_a_sorted_plan_only_slowly() -> None:
    """r = 0.95 at min fill 32: a buffer smooths over B draws, it cannot undo a sorted plan."""
    buckets = np.repeat([0, 1, 2, 3], 500)
    order = simulate_draws(len(buckets), 8, 32, 0, 0)
    assert mixing.excess_of_order(buckets[order], 8) > 0.9


def test_a_buffer_too_small_is_refused_with_both_numbers_and_the_fix() -> None:
    """F19, G3."""
    gib = 2**30
    with pytest.raises(
        ConfigError, match=r"min_fill 64 \+ 1\) x largest item 1.2 GiB = 78 GiB exceeds .* 48 GiB: lower"
    ):
        check_budget(48 * gib, int(1.2 * gib), 64, 8, 1, 1000)
    with pytest.raises(ConfigError, match=r"\(window 16 \+ 1\).*lower window to 8 or raise buffer.bytes to 17 B"):
        check_budget(9, 1, 4, 16, 1, 1000)
    with pytest.raises(ConfigError, match=r": raise buffer.bytes to"):
        check_budget(1, 1, 1, 1, 1, 1000)
    assert check_budget(11, 1, 10, 8, 1, 1000) != []
    assert check_budget(19, 1, 10, 8, 1, 1000) == []
    assert "drains" not in check_budget(200, 1, 100, 8, 1, 20)[0]
    assert "min_fill 100 is above the 20 jobs" in check_budget(200, 1, 100, 8, 1, 20)[0]
    with pytest.raises(ConfigError, match="max_age 40 is below 4 x the buffer's 20 items"):
        check_budget(20, 1, 10, 8, 1, 100, max_age=40)


def test_a_room_is_charged_once_and_freed_once() -> None:
    """G2, F10."""
    rooms = Admission(10)
    rooms.charge("a", 6)
    assert not rooms.fits(5)
    with pytest.raises(AssertionError, match="exceed 10"):
        rooms.charge("b", 5)
    with pytest.raises(AssertionError, match="charged already"):
        rooms.charge("a", 1)
    rooms.rename("a", "hung")
    assert rooms.charged == 6
    assert rooms.free("hung")
    assert not rooms.free("hung")
    assert (rooms.charged, rooms.peak) == (0, 6)


def test_blocked_seconds_are_counted_by_reason() -> None:
    blocked = Blocked()
    blocked.wait(0, "room", 1.0)
    blocked.wait(0, "room", 2.0)
    blocked.wait(1, "work", 2.0)
    blocked.wait(0, "work", 4.0)
    assert blocked.until(5.0) == {"room": 3.0, "work": 4.0}
    assert blocked.waiting() == {"work": 2}
    blocked.go(0, 6.0)
    blocked.go(1, 6.0)
    blocked.go(1, 9.0)
    assert blocked.until(99.0) == {"room": 3.0, "work": 6.0}
