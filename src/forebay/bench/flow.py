"""`forebay bench flow`: the same plan and service times under each design of the flow, on a virtual and a real clock.

What it measures: throughput from the first draw to the end of input (the last lease), as a share of the bound
min(produce, consume), which comes from the measured service times; idle shares of both sides in that span; mixing and
ages of the whole run; the peak of charged bytes as a share of the budget.
Called by the command line, which prints `table(rows)` or the rows as JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from forebay.flow.coordinator import FlowSettings
from forebay.flow.plan import EpochPlan
from forebay.flow.simulate import Load, Outcome, plan_of_jobs, simulate

ITEM_BYTES = 1000  # of no consequence: all items are of one size
KEYS = (
    "devices",
    "clock",
    "skew",
    "dispatch",
    "queue",
    "order",
    "draw",
    "share_of_bound",
    "idle_targets",
    "idle_drafters",
    "r",
    "single_bucket_windows",
    "peak_bytes_share",
    "age_p99",
)


@dataclass(frozen=True)
class Design:
    """One combination of the lines of config that are compared."""

    dispatch: str = "shared"
    queue: str = "buffered"
    order: str = "filled"
    draw: str = "live"


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
REAL = replace(FLEETS[0], jobs=500)
REAL_CASES = (
    *((skew, DEFAULT) for skew in SKEWS),
    *((SKEWS[i], DESIGNS[1]) for i in (0, 2, 5)),
    *((SKEWS[i], DESIGNS[j]) for i, j in ((5, 7), (1, 4), (2, 8), (2, 7))),
)
REAL_SHORTEST_S = 0.3  # long enough for the comparison to stand on a machine that does other work too


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


def run_virtual(fleet: Fleet, skew: Skew, design: Design) -> dict[str, Any]:
    """One combination on the virtual clock."""
    work = make_work(skew, fleet, design)
    load = Load(produce=work.produce, consume=lambda job, replica: work.consume_s)
    outcome = simulate(settings_of(fleet, design), [work.plan], load)
    return row_of(fleet, "virtual", skew, design, outcome, work.bound(fleet))


def planned_rows(fleet: Fleet, multiples: Sequence[float] = (1.5, 2, 3, 4)) -> Iterator[dict[str, Any]]:
    """What planned draws cost against live ones: at so many times the min fill, of about one and of four windows."""
    for skew in SKEWS:
        for min_fill in (fleet.min_fill, 4 * fleet.window):
            for multiple in multiples:
                sized = replace(fleet, min_fill=min_fill, capacity=int(multiple * min_fill))
                live, planned = (run_virtual(sized, skew, Design(draw=draw)) for draw in ("live", "planned"))
                of_live = planned["share_of_bound"] / live["share_of_bound"]
                yield {**planned, "capacity_over_min_fill": multiple, "of_live": of_live}


def planned_table(rows: Sequence[dict[str, Any]]) -> str:
    """Planned over live throughput: a line per skew and min fill, a column per capacity."""
    multiples = list(dict.fromkeys(row["capacity_over_min_fill"] for row in rows))
    lines = [
        "| devices | skew | min fill | " + " | ".join(f"{m:g} x" for m in multiples) + " |",
        "|---|---|---|" + "---|" * len(multiples),
    ]
    cells = {(r["devices"], r["skew"], r["min_fill"], r["capacity_over_min_fill"]): r["of_live"] for r in rows}
    for devices, skew, fill in dict.fromkeys(key[:3] for key in cells):
        shares = " | ".join(f"{cells[devices, skew, fill, m]:.1%}" for m in multiples)
        lines.append(f"| {devices} | {skew} | {fill} | {shares} |")
    return "\n".join(lines)


def rows_of(quick: bool, clock: str) -> Iterator[dict[str, Any]]:
    """The comparison, row by row. The largest fleet runs the default and the designs that fail, not every variant."""
    if clock in ("virtual", "both"):
        for fleet in (replace(FLEETS[0], jobs=1500),) if quick else FLEETS:
            for skew in SKEWS:
                for design in DESIGNS if fleet.targets < 1000 else (DEFAULT, DESIGNS[1], DESIGNS[4], DESIGNS[7]):
                    yield run_virtual(fleet, skew, design)
    if clock in ("real", "both"):
        from forebay.bench.flow_threads import run_real

        if quick:
            yield run_real(REAL, SKEWS[0], DEFAULT)
            return
        for skew, design in REAL_CASES:
            yield run_real(REAL, skew, design, REAL_SHORTEST_S)
            yield run_virtual(REAL, skew, design)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table."""
    lines = [
        "| devices | clock | skew | dispatch | queue | order | draw | share of bound | idle targets | idle drafters "
        "| r | single-bucket windows | peak / budget | age p99 |",
        "|" + "---|" * 14,
    ]
    for row in rows:
        cells = [str(row[key]) for key in KEYS[:7]]
        cells += [f"{row[key]:.1%}" for key in KEYS[7:10]]
        cells += [f"{row['r']:+.3f}", str(row["single_bucket_windows"]), f"{row['peak_bytes_share']:.2f}"]
        lines.append("| " + " | ".join([*cells, str(row["age_p99"])]) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> list[dict[str, Any]] | dict[str, Any]:
    """`forebay bench flow`."""
    parser = argparse.ArgumentParser(prog="forebay bench flow", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="6+2 devices only, one short run on the real clock; 30 s")
    parser.add_argument("--clock", choices=("virtual", "real", "both"), default="both")
    parser.add_argument(
        "--planned", action="store_true", help="what planned draws cost at small buffers (virtual clock)"
    )
    parser.add_argument("--coordination", action="store_true", help="cost of a job through all states, 8 + 8 threads")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    args = parser.parse_args(argv)
    if args.coordination:
        from forebay.bench.flow_threads import coordination_cost

        cost = coordination_cost()
        print(
            json.dumps(cost)
            if args.json
            else f"{cost['us_per_job']:.1f} us per job, {cost['cpu_us_per_job']:.1f} of CPU"
        )
        return cost
    if args.planned:
        rows = [row for fleet in FLEETS[:2] for row in planned_rows(fleet)]
        print(json.dumps(rows, indent=1) if args.json else planned_table(rows))
        return rows
    rows = list(rows_of(args.quick, args.clock))
    print(json.dumps(rows, indent=1) if args.json else table(rows))
    return rows
