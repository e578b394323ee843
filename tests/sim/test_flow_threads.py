"""The flow under real threads, through the local runtime's own loops; and the arithmetic of the mixing experiment."""

from __future__ import annotations

import random
import time

import pytest
import torch

from forebay.bench import flow_threads, mixing
from forebay.flow.coordinator import FlowSettings
from forebay.flow.simulate import plan_of_jobs
from forebay.observe.clock import Clocks


def drawn_order(targets: int) -> list[tuple[int, ...]]:
    """Windows that the training thread draws under `draw: planned`, with targets of random speed."""
    plan = plan_of_jobs([j % 3 for j in range(60)], draw="planned", window=4, min_fill=6)
    settings = FlowSettings(12, window=4, min_fill=6, targets=targets, draw="planned")
    coordinator, shell = flow_threads._shell(settings, plan)
    clocks = Clocks()
    clock = clocks.worker("drafter", "drafter 0")
    rng = random.Random(targets)
    order = []

    def compute(batch: object) -> object:
        time.sleep(rng.uniform(0, 0.004))
        return batch

    def train() -> None:
        while (got := shell.draw(clock)) is not None:
            window, parts = got
            assert [item.job_id for item in parts[0]] == list(window.jobs)
            order.append(window.jobs)
            for job in window.jobs:
                shell.release(0, job)
            shell.commit(window)

    flow_threads._run(shell, [compute] * targets, train, clocks)
    assert coordinator.admission.peak <= 12
    return order


def test_threads_draw_a_planned_order_whatever_their_number() -> None:
    """G7: 1, 2 and 6 target workers with random delays."""
    first = drawn_order(1)
    assert sorted(j for jobs in first for j in jobs) == list(range(60))
    assert drawn_order(2) == first
    assert drawn_order(6) == first


def test_eight_and_eight_threads_take_every_job_through_all_states() -> None:
    assert flow_threads.coordination_cost(jobs=320)["jobs"] == 320


def test_a_window_of_all_items_has_the_gradient_of_the_population() -> None:
    """Cosine and length ratio 1 for the whole; a single-band window is told apart."""
    bench = mixing.Bench(0, 600)
    items = bench.of_epoch("filled", 0)
    each = mixing.gradients(bench, bench.fresh_drafter(), items)
    weights = torch.tensor([item.batch.weight_sum for item in items])
    everything = range(len(items))
    (cosine,), (ratio,) = mixing.against_population(each, weights, [everything])
    assert cosine == pytest.approx(1.0, abs=1e-5)
    assert ratio == pytest.approx(1.0, abs=1e-5)
    (lone,), _ = mixing.against_population(each, weights, [[0]])
    assert lone < 0.999
