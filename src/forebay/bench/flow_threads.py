"""The flow on the real clock: `runtime.threads`'s own loops and threads, with only the compute replaced by timed waits.

Guarantees: leases, prefetch, puts, draws, micro-steps, the sum of gradients and the commit are those of a training run;
the drafter is a single parameter. Called by `bench.flow`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from forebay.bench.workload import Design, Fleet, Skew, Work, make_work, row_of, settings_of
from forebay.config import OptimConfig
from forebay.flow.coordinator import Coordinator, FlowSettings
from forebay.flow.plan import EpochPlan
from forebay.flow.simulate import Outcome, Record, plan_of_jobs
from forebay.models.loss import BlockSums
from forebay.observe.clock import Clocks
from forebay.runtime.shell import FlowShell
from forebay.runtime.threads import run_threads
from forebay.runtime.turn import Turn
from forebay.runtime.watchdog import Watchdog
from forebay.stages.train import DrafterStep, train_loop


@dataclass
class TimedReplica:
    """A drafter of one parameter whose micro-step takes a given time."""

    module: torch.nn.Module
    seconds: float
    record: Record

    def micro_step(self, item: Any, scale: float) -> BlockSums:
        start = time.monotonic()
        time.sleep(self.seconds)
        loss = next(self.module.parameters()).sum() * scale
        loss.backward()  # type: ignore[no-untyped-call]
        self.record.drafters.append((start, time.monotonic()))
        sums = BlockSums.zeros(1)
        sums.weight += 1
        return sums


@dataclass
class TimedItem:
    batch: Any

    def of(self, window: Any) -> TimedItem:
        return self


class TimedStep(DrafterStep):
    """Notes how long the sum of gradients and the optimizer step take: they are the drafters' work, not waiting."""

    record: Record
    seconds = 0.0
    steps = 0

    def step(self, *args: Any, **more: Any) -> Any:
        outcome = super().step(*args, **more)
        now, begun = time.monotonic(), self.record.drafters[-1][1]
        self.seconds += now - begun
        self.steps += 1
        self.record.steps.append((begun, now))
        return outcome


def timed_compute(work: Work, worker: int, record: Record) -> Callable[[Any], Any]:
    """A target worker's compute: host batch -> item, after the job's time on this worker."""

    def compute(batch: Any) -> Any:
        seconds = work.produce(batch.job_id, worker)
        record.asked.append(seconds)
        start = time.monotonic()
        time.sleep(seconds)
        record.targets.append((start, time.monotonic()))
        record.last_lease = max(record.last_lease, start)
        return TimedItem(batch)

    return compute


def _run(shell: FlowShell, computes: list[Callable[[Any], Any]], train: Callable[[], None], clocks: Clocks) -> None:
    quiet: Callable[[str], None] = lambda text: None  # noqa: E731
    run_threads(
        shell,
        prepare=lambda key: SimpleNamespace(
            job_id=key[1], weight_sum=1.0, n_slots=1, job=SimpleNamespace(real_tokens=1)
        ),
        computes=computes,
        train=train,
        clocks=clocks,
        watchdog=Watchdog(shell, clocks, say=quiet),
        turn=Turn(shared=False),
        say=quiet,
    )


def _shell(settings: FlowSettings, plan: EpochPlan) -> tuple[Coordinator, FlowShell]:
    coordinator = Coordinator(settings)
    coordinator.add_epoch(plan)
    coordinator.no_more_epochs()
    return coordinator, FlowShell(coordinator)


def run_real(fleet: Fleet, skew: Skew, design: Design, shortest_s: float = 0.05) -> dict[str, Any]:
    """One combination with real threads. `shortest_s`: the shortest timed wait of either side."""
    unit = make_work(skew, fleet, design)
    work = make_work(skew, fleet, design, shortest_s / min(unit.consume_s, float(unit.produce_s.min())))
    record, clocks = Record(fleet.drafters), Clocks()
    coordinator, shell = _shell(settings_of(fleet, design), work.plan)
    replicas = [TimedReplica(torch.nn.Linear(1, 1, bias=False), work.consume_s, record) for _ in range(fleet.drafters)]
    step = TimedStep(replicas, OptimConfig(), work.plan.windows)
    step.record = record
    clock = clocks.worker("drafter", "drafter 0")

    def train() -> None:
        train_loop(shell, step, Turn(shared=False), clock, lambda item: shell.release(0, item.batch.job_id), _ignore)

    start = time.monotonic()
    try:
        _run(shell, [timed_compute(work, i, record) for i in range(fleet.targets)], train, clocks)
    finally:
        step.close()
    record.first_draw = min(begin for begin, _ in record.drafters)
    outcome = Outcome(seconds=time.monotonic() - start, stats=coordinator.stats(time.monotonic()))
    record.into(outcome)
    return row_of(fleet, "real", skew, design, outcome, _measured_bound(work, fleet, record, step.seconds / step.steps))


def _ignore(window: Any, outcome: Any) -> None:
    """Nothing to do after a step."""


def _measured_bound(work: Work, fleet: Fleet, record: Record, step_s: float) -> float:
    """min(produce, consume) with the waits as they turned out, not as they were asked for."""
    consume_s = sum(end - start for start, end in record.drafters) / len(record.drafters)
    longer = sum(end - start for start, end in record.targets) / sum(record.asked)
    targets = fleet.targets - 1 + 1 / work.slow
    consume = 1 / (consume_s / fleet.drafters + step_s / fleet.window)
    return min(targets / (longer * float(work.produce_s.mean())), consume)


def coordination_cost(jobs: int = 20_000, targets: int = 8, drafters: int = 8) -> dict[str, Any]:
    """Wall-clock microseconds per job through all states, with 8 + 8 threads that compute nothing."""
    window = 4 * drafters
    settings = FlowSettings(
        4 * window, window=window, min_fill=window, targets=targets, drafters=drafters, prefetch_jobs=2 * targets
    )
    plan = plan_of_jobs([j % 4 for j in range(jobs)])
    coordinator, shell = _shell(settings, plan)
    clocks = Clocks()
    clock = clocks.worker("drafter", "drafter 0")

    def release(part: list[Any]) -> None:
        for item in part:
            shell.release(0, item.job_id)

    def train() -> None:
        with ThreadPoolExecutor(drafters) as pool:
            while (drawn := shell.draw(clock)) is not None:
                window, parts = drawn
                list(pool.map(release, parts))
                shell.commit(window)

    start, cpu = time.monotonic(), time.process_time()
    _run(shell, [lambda batch: batch for _ in range(targets)], train, clocks)
    took, burnt = time.monotonic() - start, time.process_time() - cpu
    assert coordinator.stats(0.0)["jobs"]["committed"] == jobs
    return {
        "us_per_job": took / jobs * 1e6,
        "cpu_us_per_job": burnt / jobs * 1e6,
        "jobs": jobs,
        "threads": [targets, drafters],
    }
