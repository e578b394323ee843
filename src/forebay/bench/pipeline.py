"""`forebay bench pipeline RUN.yaml`: does the whole pipeline reach what its two roles allow on one device?

Measures in one process, in turn, so that drift of the machine hits all: the target alone on the plan's jobs and the
drafter alone on their items, both with all cores, and the pipeline with each way of sharing the device. The ideal is
1 / (1/target + 1/drafter) jobs per second: no time lost in between. While the pipeline is timed the target may run
ahead, so work is counted on both sides: `share_of_ideal` is the time that the work done would have taken alone, per
second of the pipeline. Two more shares hold on a machine that others use too: `cpu_share_of_ideal` is the same by CPU
seconds (what is lost to extra work), `computing_share` the part of the time in which a role had its turn (what is lost
to waiting; only where roles alternate). Called by `forebay bench`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from forebay import config as configuration
from forebay.bench import given_run, takes_run
from forebay.observe.clock import WorkerClock
from forebay.observe.console import say
from forebay.runtime.local import LocalRuntime

Seconds = tuple[float, float]  # wall, CPU


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="forebay bench pipeline", description=__doc__.splitlines()[0])
    takes_run(p)
    p.add_argument("--jobs", type=int, default=40, help="jobs of one measurement")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--json", action="store_true")
    return p


def timed(work: Callable[[], Any]) -> Seconds:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


class _Once:
    """A run over a few jobs, built anew for each measurement so that each starts from the same state."""

    def __init__(self, args: argparse.Namespace, folder: str, sharing: str = "alternate") -> None:
        base = configuration.load(args.file, args.overrides).model_dump(mode="json")
        base["run_dir"] = folder
        base["optim"] |= {"epochs": 1}
        base["eval"] |= {"guard": False, "at_start": False}
        base["target"]["self_test"] = False
        base["runtime"]["device_sharing"] = sharing
        base["checkpoint"]["every_steps"] = 10**9
        self.local = LocalRuntime(configuration.from_dict(base), quiet=True)
        self.jobs = min(args.jobs, len(self.local.run.plans[0]))

    def target_alone(self) -> Seconds:
        """Seconds of a job's capture, all cores."""
        local = self.local
        compute = local.extract(0)
        batches = [local.extraction.prepare((0, job)) for job in range(self.jobs)]
        local.release(compute(batches[0]))
        wall, cpu = timed(lambda: [local.release(compute(batch)) for batch in batches])
        return wall / self.jobs, cpu / self.jobs

    def drafter_alone(self) -> Seconds:
        """Seconds of a job's share of drafter steps, its item being there, all cores."""
        local, clock = self.local, WorkerClock("drafter", "drafter")
        compute, prepare = local.extract(0), local.extraction.prepare
        size, took = local.config.optim.window, []
        for first in range(0, self.jobs, size):
            items = [compute(prepare((0, job))) for job in range(first, min(first + size, self.jobs))]
            step = lambda items=items: local.training.step.step([items], local.turn, clock, local.release)  # noqa: E731
            took.append(timed(step))
        wall, cpu = (sum(part) for part in zip(*took, strict=True))
        return wall / self.jobs, cpu / self.jobs

    def pipeline(self) -> tuple[Seconds, int, int]:
        """Seconds from the start of the threads until `jobs` jobs are trained; jobs captured and trained by then."""
        local, training = self.local, self.local.training
        extract, after, steps = local.extract, training.after_step, local._train
        made = trained = 0
        began: Seconds = (0.0, 0.0)
        took: list[tuple[Seconds, int, int]] = []
        self.computing_share = 0.0

        def extracting(number: int) -> Any:
            compute = extract(number)

            def counted(batch: Any) -> Any:
                nonlocal made
                item = compute(batch)
                made += 1
                return item

            return counted

        def stepped(window: Any, outcome: Any) -> None:
            nonlocal trained
            after(window, outcome)
            trained += len(window.jobs)
            if trained >= self.jobs and not took:
                now = (time.perf_counter() - began[0], time.process_time() - began[1])
                took.append((now, made, trained))
                shares = local.clocks.shares()
                self.computing_share = sum(float(shares[role]["busy_share"]) for role in ("target", "drafter"))  # type: ignore[arg-type]
                local.shell.request_stop()

        def timed_training(watchdog: Any) -> None:
            nonlocal began
            began = (time.perf_counter(), time.process_time())
            steps(watchdog)

        local.extract, local._train = extracting, timed_training  # type: ignore[method-assign]
        training.after_step, training.checkpoint = stepped, lambda: None  # type: ignore[method-assign]
        training.evaluate = lambda when: None  # type: ignore[method-assign]
        local.train()
        return took[0]


def bench_pipeline(args: argparse.Namespace) -> dict[str, Any]:
    """Medians over `--rounds`: jobs per second of each role alone, and each sharing's share of the ideal."""
    cores = torch.get_num_threads()
    alone: dict[str, list[float]] = {"target": [], "drafter": []}
    shares: dict[str, list[Seconds]] = {"alternate": [], "split": []}
    computing = []
    for number in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            torch.set_num_threads(cores)
            once = _Once(args, f"{folder}/alone")
            target, drafter = once.target_alone(), once.drafter_alone()
            once.local.close()
            alone["target"].append(1 / target[0])
            alone["drafter"].append(1 / drafter[0])
            for sharing in shares:
                torch.set_num_threads(cores)
                whole = _Once(args, f"{folder}/{sharing}", sharing)
                took, made, trained = whole.pipeline()
                if sharing == "alternate":
                    computing.append(whole.computing_share)
                wall, cpu = ((made * t + trained * d) / s for t, d, s in zip(target, drafter, took, strict=True))
                shares[sharing].append((wall, cpu))
        torch.set_num_threads(cores)
        told = ", ".join(f"{k} {v[-1][0]:.2f}" for k, v in shares.items())
        say(f"round {number + 1} of {args.rounds}: {1 / target[0]:.2f} and {1 / drafter[0]:.2f} jobs/s alone; {told}")
    rates = {role: statistics.median(values) for role, values in alone.items()}
    wall = {sharing: statistics.median(share for share, _ in values) for sharing, values in shares.items()}
    cpu = {sharing: statistics.median(share for _, share in values) for sharing, values in shares.items()}
    best = max(wall, key=lambda sharing: wall[sharing])
    ideal = 1 / (1 / rates["target"] + 1 / rates["drafter"])
    return {
        "share_of_ideal": round(wall[best], 4),
        "device_sharing": best,
        "jobs_per_s": round(wall[best] * ideal, 3),
        "alone_jobs_per_s": {role: round(rate, 3) for role, rate in rates.items()},
        "share_of_ideal_by_sharing": {k: round(v, 4) for k, v in wall.items()},
        "cpu_share_of_ideal_by_sharing": {k: round(v, 4) for k, v in cpu.items()},
        "computing_share": round(statistics.median(computing), 4),
        "threads": cores,
        "jobs": args.jobs,
        "rounds": args.rounds,
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parser().parse_args(argv)
    given_run(args)
    result = bench_pipeline(args)
    print(json.dumps(result, indent=None if args.json else 1))
    return result
