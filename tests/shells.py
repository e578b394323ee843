"""A pipeline with toy compute around any shell of the flow: what the tests of shells, threads and actors share."""

import numpy as np

from forebay.flow.coordinator import Coordinator, FlowSettings
from forebay.flow.plan import PlanParams, plan_epoch
from forebay.observe.clock import Clocks
from forebay.runtime.shell import FlowShell
from forebay.runtime.threads import run_threads
from forebay.runtime.turn import Turn
from forebay.runtime.watchdog import Watchdog


def plans(epochs=2, rows=120, window=4, **changes):
    lengths = np.random.default_rng(0).integers(8, 64, rows)
    anchors = np.maximum(1, lengths // 8)
    params = PlanParams(128, 64, 64 * 3, 3, (32, 64), window=window, min_fill=4, item_bytes=100, **changes)
    return [plan_epoch(lengths, anchors, params, epoch) for epoch in range(epochs)]


class Run:
    """A pipeline with compute replaced by `extract`, and a training loop that commits what it draws."""

    def __init__(
        self,
        plans,
        targets=3,
        budget=2000,
        extract=lambda key: key,
        after=lambda n, shell: None,
        make=FlowShell,
        saved=None,
        **settings,
    ):
        self.plans = plans
        given = {
            "budget_bytes": budget,
            "window": plans[0].params.window,
            "min_fill": 4,
            "targets": targets,
            **settings,
        }
        if saved is None:
            self.coordinator = Coordinator(FlowSettings(**given))
            for plan in plans:
                self.coordinator.add_epoch(plan)
        else:
            self.coordinator = Coordinator.resume(FlowSettings(**given), saved, plans.__getitem__)
        self.coordinator.no_more_epochs()
        self.shell = make(self.coordinator)
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
        return run_threads(
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

    @property
    def stats(self):
        return self.shell.stats()
