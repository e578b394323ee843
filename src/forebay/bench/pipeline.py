"""`forebay bench pipeline RUN.yaml`: does the whole pipeline reach what its two roles allow on one device?

Measures, in one process and alternating, (a) the target alone on the plan's jobs, (b) the drafter alone on their items,
both with all cores, and (c) the pipeline over the same jobs, with each way of sharing the device. The ideal is
1 / (1/target + 1/drafter) jobs per second: no time lost in between. Called by `forebay bench`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch

from forebay import config as configuration
from forebay.observe.clock import WorkerClock
from forebay.observe.console import say
from forebay.runtime.training import TrainingRun


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="forebay bench pipeline", description=__doc__.splitlines()[0])
    p.add_argument("file", help="a run's YAML file")
    p.add_argument("overrides", nargs="*", metavar="key=value")
    p.add_argument("--jobs", type=int, default=40, help="jobs of one measurement")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--json", action="store_true")
    return p


class _Once:
    """A run over a few jobs, built anew for each measurement so that each starts from the same state."""

    def __init__(self, args: argparse.Namespace, folder: str, sharing: str = "alternate") -> None:
        base = configuration.load(args.file, args.overrides).model_dump(mode="json")
        base["run_dir"] = folder
        base["optim"] |= {"epochs": 1}
        base["eval"] |= {"guard": False, "at_start": False}
        base["runtime"]["device_sharing"] = sharing
        base["checkpoint"]["every_steps"] = 10**9
        self.run = TrainingRun(configuration.from_dict(base), quiet=True)
        self.jobs = min(args.jobs, len(self.run.plans[0]))

    def target_alone(self) -> float:
        """Jobs per second of capture, all cores."""
        run = self.run
        compute = run._extract(0)
        batches = [run._prepare_job((0, job)) for job in range(self.jobs)]
        start = time.perf_counter()
        for batch in batches:
            run.pool.release(compute(batch).slot)
        return self.jobs / (time.perf_counter() - start)

    def drafter_alone(self) -> float:
        """Jobs per second of drafter steps on items that are there, all cores."""
        run, clock = self.run, WorkerClock("drafter", "drafter")
        compute = run._extract(0)
        window, seconds, done = run.config.optim.window, 0.0, 0
        while done < self.jobs:
            items = [compute(run._prepare_job((0, done + i))) for i in range(min(window, self.jobs - done))]
            done += len(items)
            start = time.perf_counter()
            run.step.step([items], run.turn, clock, lambda item: run.pool.release(item.slot))
            seconds += time.perf_counter() - start
        return self.jobs / seconds

    def pipeline(self) -> float:
        """Jobs per second of the whole, from the first lease to the last commit of `jobs` jobs."""
        run = self.run
        taken = [0, 0.0]
        after = run._after_step

        def hook(window: Any, outcome: Any) -> None:
            after(window, outcome)
            taken[0] += len(window.jobs)
            if taken[0] >= self.jobs and not run.shell.stopping:
                taken[1] = time.perf_counter() - start
                run.shell.request_stop()

        run._after_step = hook  # type: ignore[method-assign]
        run._checkpoint = lambda: None  # type: ignore[method-assign]
        run.pool.release(run.pool.acquire())
        start = time.perf_counter()
        run.run()
        return taken[0] / (taken[1] or time.perf_counter() - start)


def bench_pipeline(args: argparse.Namespace) -> dict[str, Any]:
    """Medians over `--rounds` of jobs per second, and each sharing's share of the ideal."""
    rates: dict[str, list[float]] = {"target": [], "drafter": [], "alternate": [], "split": []}
    shares: dict[str, list[float]] = {"alternate": [], "split": []}
    for number in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            once = _Once(args, folder + "/alone")
            rates["target"].append(once.target_alone())
            rates["drafter"].append(once.drafter_alone())
            ideal = 1 / (1 / rates["target"][-1] + 1 / rates["drafter"][-1])
            for sharing in shares:
                rate = _Once(args, f"{folder}/{sharing}", sharing).pipeline()
                rates[sharing].append(rate)
                shares[sharing].append(rate / ideal)
        say(f"round {number + 1} of {args.rounds}: " + ", ".join(f"{k} {v[-1]:.2f} jobs/s" for k, v in rates.items()))
    best = max(shares, key=lambda k: statistics.median(shares[k]))
    return {
        "jobs_per_s": {k: round(statistics.median(v), 3) for k, v in rates.items()},
        "share_of_ideal": round(statistics.median(shares[best]), 4),
        "device_sharing": best,
        "share_of_ideal_by_sharing": {k: round(statistics.median(v), 4) for k, v in shares.items()},
        "threads": torch.get_num_threads(),
        "jobs": args.jobs,
        "rounds": args.rounds,
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parser().parse_args(argv)
    result = bench_pipeline(args)
    print(json.dumps(result, indent=None if args.json else 1))
    return result
