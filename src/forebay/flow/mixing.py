"""Formulas about mixing and ages, and the meter that applies them to a run. Pure arithmetic.

Guarantees: the formulas are exact (tests hold them against enumeration or chi-square). The meter costs a few
microseconds per window and remembers counts, not windows. Called by the plan, the coordinator, checks and tests.

The excess r is the chance that two items of one window share a bucket, beyond what independent draws from the plan
would give, on a scale where 0 is random and 1 is a window of a single bucket. Below 0 is better than random.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import comb
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay.flow.queues import simulate_draws

Ints = npt.NDArray[Any]

TARGET_R = 0.02
ALARM_R = 0.1
EDGE_SHARE = 0.05  # the first and last windows of an epoch whose mix is held against the plan


def same_bucket_chance(shares: Sequence[float]) -> float:
    """P(two independent draws share a bucket) = sum p_b^2."""
    return sum(p * p for p in shares)


def same_bucket_share(counts: Iterable[int]) -> float:
    """S of one window: the share of its pairs that share a bucket."""
    counts = list(counts)
    n = sum(counts)
    return sum(c * (c - 1) for c in counts) / (n * (n - 1)) if n > 1 else 0.0


def excess(share: float, chance: float) -> float:
    """r = (S - sum p^2) / (1 - sum p^2); 0 where there is one bucket only and nothing can be mixed."""
    return (share - chance) / (1 - chance) if chance < 1 else 0.0


def excess_of_order(buckets: Ints, window: int) -> float:
    """Mean r over windows of consecutive jobs. buckets: [J] in the order of the draws."""
    whole = len(buckets) // window
    if whole == 0 or window < 2:
        return 0.0
    kinds = int(buckets.max()) + 1
    shares = np.bincount(buckets, minlength=kinds) / len(buckets)
    place = np.repeat(np.arange(whole), window) * kinds + buckets[: whole * window].astype(np.int64)
    counts = np.bincount(place, minlength=whole * kinds)
    pairs = int((counts * (counts - 1)).sum()) / (whole * window * (window - 1))
    return float(excess(pairs, float((shares**2).sum())))


def whole_windows(order: Ints, window: int) -> Ints:
    """The jobs of an order of draws without those of short windows (filled up with -1, or the last one)."""
    windows = order[: len(order) // window * window].reshape(-1, window)
    return windows[(windows >= 0).all(axis=1)].ravel()


def single_bucket_chance(counts: Sequence[int], k: int) -> float:
    """P(k draws without refill are all of one bucket) = sum_b C(n_b, k) / C(n, k)."""
    return sum(comb(n, k) for n in counts) / comb(sum(counts), k)


def mean_run(shares: Sequence[float]) -> float:
    """Mean length of a run of draws of the same bucket, for independent draws: 1 / (1 - sum p_b^2)."""
    return 1 / (1 - same_bucket_chance(shares))


def mean_residence(occupancy: int) -> float:
    """Draws from an item's arrival up to and with its own, at constant occupancy B: B (geometric); its age is B - 1."""
    return float(occupancy)


def variance_factor(window: int, r: float) -> float:
    """By how much the between-bucket part of the gradient variance is inflated: 1 + (G - 1) r."""
    return 1 + (window - 1) * r


def warnings_of_plan(buckets: Ints, order: str, window: int, min_fill: int, seed: int = 0, reuse: int = 1) -> list[str]:
    """What a user should know before training: windows that will not be mixed, with the numbers.

    buckets: [J] in plan order, drawn here through a simulated buffer at its min fill.
    """
    lines = []
    kinds, jobs = len(np.unique(buckets)), len(buckets)
    if window < 4 and kinds > 1:
        lines.append(
            f"optim.window {window} is below 4 items: a step sees at most {min(window, kinds)} of {kinds} buckets; "
            "raise optim.window to 4 or more"
        )
    if len(buckets) > 100_000:  # ten stretches stand for a large plan: a sorted one shows all its buckets in them
        starts = np.linspace(0, len(buckets) - 10_000, 10).astype(np.int64)
        buckets = buckets[(starts[:, None] + np.arange(10_000)).ravel()]
    r = 0.0
    if kinds > 1:
        drawn = simulate_draws(len(buckets), window, min_fill, seed, 0, reuse=reuse)
        r = excess_of_order(buckets[whole_windows(drawn, window)], window)
    if r > ALARM_R:
        lines.append(
            f"windows will not be mixed: r = {r:.2f} (alarm {ALARM_R}) with order: {order}, window {window}, min_fill "
            f"{min_fill} of {jobs} jobs; set plan.order: filled or raise buffer.min_fill"
        )
    return lines


def percentile(histogram: Counter[int], share: float) -> int:
    """The smallest value with at least `share` of the counts at or below it; 0 of nothing."""
    need = share * sum(histogram.values())
    seen = 0
    for value in sorted(histogram):
        seen += histogram[value]
        if seen >= need:
            return value
    return 0


def of_windows(windows: Sequence[Sequence[int]], plan: Sequence[int], edges: Sequence[int]) -> dict[str, Any]:
    """What windows were made of, against what the plan holds.

    windows: the buckets of each window's items; plan: [B] jobs of each bucket; edges: [B] upper edges in tokens.
    Returns r (mean over windows of two items and more), distinct_buckets (mean), and for each bucket its share of the
    plan's jobs, its items in a window (mean, standard deviation) and the share of windows that hold it.
    """
    shares = np.asarray(plan) / max(sum(plan), 1)
    counts = np.array([np.bincount(window, minlength=len(plan)) for window in windows]).reshape(-1, len(plan))
    chance = same_bucket_chance(shares.tolist())
    excesses = [excess(same_bucket_share(window), chance) for window in counts.tolist() if sum(window) > 1]
    held, any_window = counts > 0, max(len(counts), 1)
    return {
        "windows": len(counts),
        "r": float(np.mean(excesses)) if excesses else 0.0,
        "distinct_buckets": float(held.sum() / any_window),
        "single_bucket_windows": int((held.sum(axis=1) == 1).sum()),
        "buckets": [
            {
                "up_to_tokens": int(edge),
                "share_of_jobs": float(shares[b]),
                "items_per_window": float(counts[:, b].sum() / any_window),
                "items_per_window_sd": float(counts[:, b].std()) if len(counts) else 0.0,
                "share_of_windows": float(held[:, b].sum() / any_window),
            }
            for b, edge in enumerate(edges)
        ],
    }


class Meter:
    """Measures the mixing of one epoch's windows as they are drawn."""

    def __init__(self, bucket_counts: Sequence[int], windows: int) -> None:
        """`bucket_counts`: jobs of each bucket; `windows`: how many windows the epoch is expected to have."""
        jobs = max(sum(bucket_counts), 1)
        self._shares = [c / jobs for c in bucket_counts]
        self._chance = same_bucket_chance(self._shares)
        edge = max(int(windows * EDGE_SHARE), 1)
        self._first, self._last = edge, windows - edge
        self.windows = 0
        self.items = 0
        self.forced = 0
        self.single_bucket = 0
        self.sum_r = 0.0
        self.sum_occupancy = 0
        self.distinct = 0
        self.measured = 0
        self.last_r = 0.0
        self.ages: Counter[int] = Counter()
        self.gaps: Counter[int] = Counter()
        self._age_of_bucket = [0] * len(self._shares)
        self._drawn_of_bucket = [0] * len(self._shares)
        self._early = [0] * len(self._shares)
        self._late = [0] * len(self._shares)

    def window(self, buckets: Sequence[int], ages: Sequence[int], occupancy: int, forced: int) -> float:
        """Count one drawn window; returns its r. occupancy: items there when it was drawn."""
        counts = Counter(buckets)
        if len(buckets) > 1:
            self.last_r = excess(same_bucket_share(counts.values()), self._chance)
            self.sum_r += self.last_r
            self.measured += 1
            self.single_bucket += len(counts) == 1
        self.distinct += len(counts)
        self.items += len(buckets)
        self.forced += forced
        self.sum_occupancy += occupancy
        self.ages.update(ages)
        for bucket, age in zip(buckets, ages, strict=True):
            self._age_of_bucket[bucket] += age
            self._drawn_of_bucket[bucket] += 1
        for edge, inside in ((self._early, self.windows < self._first), (self._late, self.windows >= self._last)):
            if inside:
                for bucket in buckets:
                    edge[bucket] += 1
        self.windows += 1
        return self.last_r

    def use(self, gap: int) -> None:
        """An item is used `gap` windows after its last use; 0: for the first time."""
        self.gaps[gap] += gap > 0

    def _drift(self, counts: list[int]) -> float:
        """Largest difference between a bucket's share in these windows and in the plan."""
        n = sum(counts)
        return max((abs(c / n - p) for c, p in zip(counts, self._shares, strict=True)), default=0.0) if n else 0.0

    def report(self) -> dict[str, Any]:
        windows = max(self.windows, 1)
        return {
            "windows": self.windows,
            "items": self.items,
            "r": self.sum_r / max(self.measured, 1),
            "single_bucket_windows": self.single_bucket,
            "distinct_buckets": self.distinct / windows,
            "occupancy_at_draw": self.sum_occupancy / windows,
            "age_p50": percentile(self.ages, 0.5),
            "age_p99": percentile(self.ages, 0.99),
            "age_max": max(self.ages, default=0),
            "use_gap_p50": percentile(self.gaps, 0.5),
            "use_gap_min": min((gap for gap in self.gaps if gap), default=0),
            "forced_share": self.forced / max(self.items, 1),
            "drift_first": self._drift(self._early),
            "drift_last": self._drift(self._late),
            "age_by_bucket": [a / max(n, 1) for a, n in zip(self._age_of_bucket, self._drawn_of_bucket, strict=True)],
        }
