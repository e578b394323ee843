"""The work and the devices that `forebay bench flow` compares designs on: the same for a virtual and a real clock.

Called by `bench.flow` and `bench.flow_threads`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.flow.coordinator import FlowSettings
from forebay.flow.plan import EpochPlan
from forebay.flow.simulate import Outcome, plan_of_jobs

ITEM_BYTES = 1000  # of no consequence: all items are of one size


@dataclass(frozen=True)
class Design:
    """One combination of the lines of config that are compared."""

    dispatch: str = "shared"
    queue: str = "buffered"
    order: str = "filled"
    draw: str = "live"
    reuse: int = 1


DEFAULT = Design()
DESIGNS = (
    DEFAULT,
    Design(draw="planned"),
    Design(order="shuffled"),
    Design(order="sorted"),
    Design(queue="bucketed"),
    Design(queue="per_drafter"),
    Design(queue="per_drafter", order="sorted"),
    Design(dispatch="per_target"),
    Design(dispatch="per_target", queue="per_drafter", order="sorted"),
)


@dataclass(frozen=True)
class Skew:
    """How uneven the work is. Times are in units of a job's mean time on a plain target.

    shares: of the buckets; cost: mean time of a bucket's jobs relative to the others; spread: sigma of a log-normal
    factor per job; balance: what the targets can produce over what the drafters can consume; slow: factor of target 0.
    """

    name: str
    shares: tuple[float, ...] = (0.25, 0.25, 0.25, 0.25)
    cost: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    spread: float = 0.1
    balance: float = 1.1
    slow: float = 1.0


SKEWS = (
    Skew("even"),
    Skew("rare bucket", shares=(0.49, 0.49, 0.02), cost=(1.0, 1.0, 1.0)),
    Skew("long tail", shares=(0.4, 0.3, 0.2, 0.1), cost=(0.5, 0.9, 1.5, 2.5), spread=0.2),
    Skew("fast drafters", balance=0.6),
    Skew("fast targets", balance=1.6),
    Skew("slow target", slow=5.0),
)


@dataclass(frozen=True)
class Fleet:
    """Devices and the buffer that goes with them, in items."""

    targets: int
    drafters: int
    window: int
    min_fill: int
    capacity: int
    jobs: int

    @property
    def name(self) -> str:
        return f"{self.targets}+{self.drafters}"


FLEETS = (
    Fleet(6, 2, 8, 10, 40, 4000),
    Fleet(48, 16, 64, 128, 512, 12_000),
    Fleet(3072, 1024, 4096, 8192, 32_768, 120_000),
)


@dataclass(frozen=True)
class Work:
    """A plan and how long each of its jobs takes, by skew and fleet; the same for every design."""

    plan: EpochPlan
    produce_s: np.ndarray
    consume_s: float
    slow: float

    def produce(self, job: int, worker: int) -> float:
        return float(self.produce_s[job]) * (self.slow if worker == 0 else 1.0)

    def bound(self, fleet: Fleet) -> float:
        """min(produce, consume) in items per second."""
        targets = fleet.targets - 1 + 1 / self.slow
        return min(targets / float(self.produce_s.mean()), fleet.drafters / self.consume_s)


def order_buckets(shares: Sequence[float], jobs: int, order: str, rng: np.random.Generator) -> np.ndarray:
    """Buckets of the jobs in plan order. `filled`: a random stream of rows fills a bin per bucket, twelve to a bin."""
    counts = np.floor(np.asarray(shares) * jobs + 0.5).astype(int)
    buckets = np.repeat(np.arange(len(shares)), counts)
    if order == "sorted":
        return buckets
    if order == "shuffled":
        return rng.permutation(buckets)
    rows = rng.permutation(np.repeat(buckets, 12))
    filled = []
    seen = [0] * len(shares)
    for bucket in rows.tolist():
        seen[bucket] += 1
        if seen[bucket] % 12 == 0:
            filled.append(bucket)
    return np.array(filled)


def make_work(skew: Skew, fleet: Fleet, design: Design, unit_s: float = 1.0, seed: int = 0) -> Work:
    """`unit_s`: mean seconds of a job on a plain target."""
    rng = np.random.default_rng(seed)
    buckets = order_buckets(skew.shares, fleet.jobs, design.order, rng)
    cost = np.asarray(skew.cost)[buckets] * rng.lognormal(-(skew.spread**2) / 2, skew.spread, len(buckets))
    cost *= unit_s / cost.mean()
    plan = plan_of_jobs(
        buckets.tolist(),
        nbytes=ITEM_BYTES,
        real=[1000] * len(buckets),
        draw=design.draw,
        window=fleet.window,
        min_fill=fleet.min_fill,
        reuse=design.reuse,
    )
    targets = fleet.targets - 1 + 1 / skew.slow
    return Work(plan, cost, unit_s * skew.balance * fleet.drafters / targets, skew.slow)


def settings_of(fleet: Fleet, design: Design) -> FlowSettings:
    return FlowSettings(
        budget_bytes=fleet.capacity * ITEM_BYTES,
        window=fleet.window,
        min_fill=fleet.min_fill,
        targets=fleet.targets,
        drafters=fleet.drafters,
        dispatch=design.dispatch,
        queue=design.queue,
        draw=design.draw,
        reuse=design.reuse,
        lease_s=1e9,
    )


def row_of(fleet: Fleet, clock: str, skew: Skew, design: Design, outcome: Outcome, bound: float) -> dict[str, Any]:
    mixing = outcome.stats["mixing"][0]
    idle_targets, idle_drafters = outcome.idle(fleet.targets, fleet.drafters)
    return {
        "devices": fleet.name,
        "clock": clock,
        "skew": skew.name,
        "dispatch": design.dispatch,
        "queue": design.queue,
        "order": design.order,
        "draw": design.draw,
        "share_of_bound": outcome.throughput / bound,
        "idle_targets": idle_targets,
        "idle_drafters": idle_drafters,
        "r": mixing["r"],
        "single_bucket_windows": mixing["single_bucket_windows"],
        "peak_bytes_share": outcome.stats["peak_bytes"] / outcome.stats["budget_bytes"],
        "age_p99": mixing["age_p99"],
        "min_fill": fleet.min_fill,
        "window": fleet.window,
        "capacity": fleet.capacity,
        "jobs": fleet.jobs,
        "turn_passes": outcome.stats["turn_passes"],
        "drift_last": mixing["drift_last"],
    }
