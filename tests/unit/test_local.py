"""The local runtime with real threads: everything is trained once, failures end the run by name, stops are clean."""

import threading
import time

import numpy as np
import pytest

from forebay.errors import PoisonError
from forebay.flow.coordinator import Coordinator, FlowSettings
from forebay.flow.plan import PlanParams, plan_epoch
from forebay.observe.clock import Clocks
from forebay.runtime.local import Watchdog, run_local
from forebay.runtime.shell import FlowShell
from forebay.runtime.turn import Turn


def plans(epochs=2, rows=120, window=4, **changes):
    lengths = np.random.default_rng(0).integers(8, 64, rows)
    anchors = np.maximum(1, lengths // 8)
    params = PlanParams(128, 64, 64 * 3, 3, (32, 64), window=window, min_fill=4, item_bytes=100, **changes)
    return [plan_epoch(lengths, anchors, params, epoch) for epoch in range(epochs)]


class Run:
    """A pipeline with compute replaced by `extract`, and a training loop that commits what it draws."""

    def __init__(self, plans, targets=3, budget=2000, extract=lambda key: key, after=lambda n, shell: None, **settings):
        self.plans = plans
        given = {
            "budget_bytes": budget,
            "window": plans[0].params.window,
            "min_fill": 4,
            "targets": targets,
            **settings,
        }
        self.coordinator = Coordinator(FlowSettings(**given))
        for plan in plans:
            self.coordinator.add_epoch(plan)
        self.coordinator.no_more_epochs()
        self.shell = FlowShell(self.coordinator)
        self.clocks = Clocks()
        self.clock = self.clocks.worker("drafter", "drafter 0")
        self.committed, self.extract, self.after, self.targets = [], extract, after, targets
        self.watchdog = Watchdog(self.shell, self.clocks, say=lambda text: None)

    def train(self):
        windows = 0
        while (drawn := self.shell.draw(self.clock)) is not None:
            window, parts = drawn
            for part in parts:
                for epoch, job in part:
                    self.shell.release(epoch, job)
            self.shell.commit(window)
            self.committed += [(window.epoch, job) for job in window.jobs]
            windows += 1
            self.after(windows, self.shell)

    def __call__(self):
        return run_local(
            self.shell,
            prepare=lambda key: key,
            computes=[self.extract] * self.targets,
            train=self.train,
            clocks=self.clocks,
            watchdog=self.watchdog,
            turn=Turn(shared=False),
            say=lambda text: None,
        )

    @property
    def everything(self):
        return sorted((plan.epoch, job) for plan in self.plans for job in range(len(plan)))


def test_every_job_of_every_epoch_is_committed_exactly_once():
    """G1, with three targets."""
    run = Run(plans())
    assert run() == []
    assert sorted(run.committed) == run.everything
    assert run.coordinator.admission.peak <= 2000 and run.coordinator.admission.charged == 0


def test_a_job_that_fails_twice_is_tried_again_and_committed():
    """F13."""
    failed = []

    def extract(key):
        if key == (0, 3) and len(failed) < 2:
            failed.append(key)
            raise ValueError("planted")
        return key

    run = Run(plans(), extract=extract)
    run()
    assert len(failed) == 2 and sorted(run.committed) == run.everything
    assert sum("planted" in line for line in run.shell.failures) == 2


def test_a_job_that_always_fails_stops_the_run_by_name_or_is_quarantined():
    """F13, G10."""

    def extract(key):
        if key == (0, 3):
            raise ValueError("planted")
        return key

    with pytest.raises(PoisonError, match=r"job 3 of epoch 0 failed 3 times.*planted"):
        Run(plans(), extract=extract)()
    run = Run(plans(), extract=extract, on_poison="continue")
    run()
    assert sorted([*run.committed, (0, 3)]) == run.everything
    assert run.coordinator.quarantined == {0: {3: "ValueError: planted"}}


def test_a_bug_in_any_thread_ends_the_run_with_that_cause():
    """G10: the first cause is raised, everyone else stops."""

    def after(windows, shell):
        if windows == 2:
            raise ZeroDivisionError("planted in the training loop")

    before = threading.active_count()
    with pytest.raises(RuntimeError, match="planted in the training loop") as error:
        Run(plans(), after=after)()
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert threading.active_count() == before


def test_a_stop_finishes_the_window_and_leaves_the_rest_for_a_resume():
    """F04, F06: what is left plus what was committed is everything, each once."""

    def stop(windows, shell):
        if windows == 3:
            shell.request_stop()

    first = Run(plans(), after=stop)
    first()
    assert len(first.committed) == 3 * 4
    saved = first.shell.snapshot()
    second = Run(plans())
    second.coordinator = Coordinator.resume(first.coordinator.settings, saved, second.plans.__getitem__)
    second.coordinator.no_more_epochs()
    second.shell = FlowShell(second.coordinator)
    second.watchdog = Watchdog(second.shell, second.clocks, say=lambda text: None)
    second()
    assert sorted(first.committed + second.committed) == first.everything


def test_a_silent_worker_loses_its_job_and_its_late_answer_is_refused():
    """F24: leases, with a real hang."""
    answered = threading.Event()
    late = []

    def extract(key):
        if key == (0, 2) and not late:
            late.append(key)
            answered.wait(20)
        return key

    def after(windows, shell):
        if (0, 2) in run.committed:
            answered.set()

    run = Run(plans(epochs=1), extract=extract, after=after, lease_s=0.05)
    run()
    answered.set()
    assert sorted(run.committed) == run.everything
    assert run.coordinator.counters["expired"] >= 1 and run.coordinator.counters["stale_puts"] >= 1


def test_no_thread_is_left_after_many_runs():
    before = threading.active_count()
    start = time.monotonic()
    rounds = 0
    while rounds < 50:
        Run(plans(epochs=1, rows=24), targets=2)()
        rounds += 1
    assert threading.active_count() == before
    assert time.monotonic() > start
