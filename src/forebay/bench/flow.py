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
from dataclasses import replace
from typing import Any

from forebay.bench.flow_threads import coordination_cost, run_real
from forebay.bench.workload import DEFAULT, DESIGNS, FLEETS, SKEWS, Design, Fleet, Skew, make_work, row_of, settings_of
from forebay.flow.coordinator import Window
from forebay.flow.simulate import Load, simulate

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


REAL = replace(FLEETS[0], jobs=500)
REAL_CASES = (
    *((skew, DEFAULT) for skew in SKEWS),
    *((SKEWS[i], DESIGNS[1]) for i in (0, 2, 5)),
    *((SKEWS[i], DESIGNS[j]) for i, j in ((5, 7), (1, 4), (2, 8), (2, 7))),
)
REAL_SHORTEST_S = 0.3  # long enough for the comparison to stand on a machine that does other work too


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


def gaps_of(windows: Sequence[Window]) -> list[int]:
    """Windows between one use of an item and its next, for all of them."""
    used: dict[int, int] = {}
    gaps = []
    for window in windows:
        gaps += [window.number - used[job] for job in window.jobs if job in used]
        used |= dict.fromkeys(window.jobs, window.number)
    return gaps


def reuse_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| devices | min fill | reuse | uses/s over the bound without | idle drafters | r | mean gap, windows "
        "| in the next window | windows more |",
        "|" + "---|" * 9,
    ]
    lines += [
        f"| {x['devices']} | {x['min_fill']} | {x['reuse']} | {x['of_bound_without']:.2f} | {x['idle_drafters']:.1%} "
        f"| {x['r']:+.3f} | {x['gap_mean']:.1f} | {x['in_the_next_window']:.1%} | {x['windows_more']} |"
        for x in rows
    ]
    return "\n".join(lines)


def reuse_rows(fleet: Fleet, fills: Sequence[int] = (8, 10, 16, 32)) -> Iterator[dict[str, Any]]:
    """What reuse does where the targets produce a third of what the drafters could use, by min fill, live draws."""
    skew = Skew("slow targets", balance=1 / 3)
    for min_fill in fills:
        sized = replace(fleet, min_fill=min_fill)
        for reuse in (1, 2, 4):
            design = Design(reuse=reuse)
            work = make_work(skew, sized, design)
            load = Load(produce=work.produce, consume=lambda job, replica, work=work: work.consume_s)  # type: ignore[misc]
            outcome = simulate(settings_of(sized, design), [work.plan], load)
            gaps = gaps_of(outcome.windows)
            yield {
                "devices": sized.name,
                "min_fill": min_fill,
                "reuse": reuse,
                "of_bound_without": outcome.throughput / work.bound(sized),
                "idle_drafters": outcome.idle(sized.targets, sized.drafters)[1],
                "r": outcome.stats["mixing"][0]["r"],
                "gap_mean": sum(gaps) / max(len(gaps), 1),
                "in_the_next_window": gaps.count(1) / max(len(gaps), 1),
                "windows_more": len(outcome.windows) - work.plan.windows,
            }


def rows_of(quick: bool, clock: str) -> Iterator[dict[str, Any]]:
    """The comparison, row by row. The largest fleet runs the default and the designs that fail, not every variant."""
    if clock in ("virtual", "both"):
        for fleet in (replace(FLEETS[0], jobs=1500),) if quick else FLEETS:
            for skew in SKEWS:
                for design in DESIGNS if fleet.targets < 1000 else (DEFAULT, DESIGNS[1], DESIGNS[4], DESIGNS[7]):
                    yield run_virtual(fleet, skew, design)
    if clock in ("real", "both"):
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
    parser.add_argument(
        "--reuse", action="store_true", help="what item reuse does where targets are slow (virtual clock)"
    )
    parser.add_argument("--coordination", action="store_true", help="cost of a job through all states, 8 + 8 threads")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    args = parser.parse_args(argv)
    if args.coordination:
        cost = coordination_cost()
        print(
            json.dumps(cost)
            if args.json
            else f"{cost['us_per_job']:.1f} us per job, {cost['cpu_us_per_job']:.1f} of CPU"
        )
        return cost
    if args.reuse:
        rows = list(reuse_rows(FLEETS[0]))
        print(json.dumps(rows, indent=1) if args.json else reuse_table(rows))
        return rows
    if args.planned:
        rows = [row for fleet in FLEETS[:2] for row in planned_rows(fleet)]
        print(json.dumps(rows, indent=1) if args.json else planned_table(rows))
        return rows
    rows = list(rows_of(args.quick, args.clock))
    print(json.dumps(rows, indent=1) if args.json else table(rows))
    return rows
