"""The same coordinator on a virtual clock: any number of targets and drafters, service times, failures; milliseconds.

Guarantees: defines no queue, ledger or admission of its own; what is simulated is what runs. A simulation is a function
of its arguments. Called by `forebay bench flow` and by tests.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forebay.flow.coordinator import Coordinator, FlowSettings, Lease, Wait, Window
from forebay.flow.jobs import EpochPlan, PlanParams
from forebay.flow.queues import simulate_draws


def plan_of_jobs(
    buckets: Sequence[int],
    epoch: int = 0,
    nbytes: Sequence[int] | int = 1,
    real: Sequence[int] | None = None,
    draw: str = "live",
    window: int = 8,
    min_fill: int = 10,
    seed: int = 0,
    reuse: int = 1,
) -> EpochPlan:
    """A plan of jobs of one row each, given by their buckets: for simulations and tests."""
    n = len(buckets)
    kinds = max(buckets, default=0) + 1
    tokens = np.asarray(real if real is not None else [1] * n, dtype=np.int32)
    params = PlanParams(
        token_budget=int(tokens.max(initial=1)),
        anchors_per_item=1,
        slots_per_item=1,
        scored_slots=1,
        bucket_edges=tuple(range(1, kinds + 1)),
        draw=draw,
        window=window,
        min_fill=min_fill,
        item_bytes=1,
        reuse=reuse,
        seed=seed,
    )
    arrays: dict[str, Any] = {
        "rows": np.arange(n, dtype=np.int32),
        "lengths": tokens,
        "starts": np.ones(n, dtype=np.bool_),
        "offsets": np.arange(n + 1, dtype=np.int64),
        "buckets": np.asarray(buckets, dtype=np.uint8),
        "real": tokens,
        "padded": tokens,
        "anchors": np.ones(n, dtype=np.int32),
        "nbytes": np.asarray(np.broadcast_to(np.asarray(nbytes), (n,)), dtype=np.int64),
    }
    if draw == "planned":
        arrays["draw_order"] = simulate_draws(n, window, min_fill, seed, epoch, reuse=reuse)
    return EpochPlan(params, epoch, arrays)


def _never(job: int, attempt: int) -> bool:
    return False


@dataclass(frozen=True)
class Load:
    """How long things take: `produce(job, worker)`, `consume(job, replica)` and a step's own part, in seconds.

    `fails(job, attempt)`: the attempt ends with an error. `silent(job, attempt)`: it answers only after its lease.
    `skips(draw)`: the step of this draw number is not taken.
    """

    produce: Callable[[int, int], float]
    consume: Callable[[int, int], float]
    step_s: float = 0.0
    fails: Callable[[int, int], bool] = _never
    silent: Callable[[int, int], bool] = _never
    skips: Callable[[int], bool] = lambda number: False


@dataclass
class Outcome:
    """What a run did. The span is from the first draw to the end of input, when the last job was leased."""

    windows: list[Window] = field(default_factory=list)
    committed: list[tuple[int, int]] = field(default_factory=list)
    seconds: float = 0.0
    span: tuple[float, float] = (0.0, 0.0)
    consumed: int = 0
    busy_targets_s: float = 0.0
    busy_drafters_s: float = 0.0
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def order(self) -> list[tuple[int, int]]:
        """(epoch, job) in the order of the draws."""
        return [(window.epoch, job) for window in self.windows for job in window.jobs]

    @property
    def throughput(self) -> float:
        """Items consumed per second of the span."""
        return self.consumed / max(self.span[1] - self.span[0], 1e-12)

    def idle(self, targets: int, drafters: int) -> tuple[float, float]:
        """Idle share of the targets and of the drafters in the span."""
        span = max(self.span[1] - self.span[0], 1e-12)
        return 1 - self.busy_targets_s / (span * targets), 1 - self.busy_drafters_s / (span * drafters)


class Record:
    """Busy intervals and finished items, cut to the span when it is known. The real-clock benchmark keeps one too.

    `steps`: what all drafters do together at a window's end. `asked`: the times that were asked for, on a real clock.
    """

    def __init__(self, drafters: int) -> None:
        self.count = drafters
        self.first_draw: float | None = None
        self.last_lease = 0.0
        self.targets: list[tuple[float, float]] = []
        self.drafters: list[tuple[float, float]] = []
        self.steps: list[tuple[float, float]] = []
        self.asked: list[float] = []

    def into(self, outcome: Outcome) -> Outcome:
        lo, hi = self.first_draw or 0.0, self.last_lease
        outcome.span = (lo, hi)
        outcome.consumed = sum(lo < end <= hi for _, end in self.drafters)
        outcome.busy_targets_s, outcome.busy_drafters_s, together = (
            sum(max(min(end, hi) - max(start, lo), 0.0) for start, end in busy)
            for busy in (self.targets, self.drafters, self.steps)
        )
        outcome.busy_drafters_s += self.count * together
        return outcome


class Simulation:
    """Targets and drafters as events in a heap: (time, number, what happens)."""

    def __init__(self, settings: FlowSettings, plans: Sequence[EpochPlan], load: Load) -> None:
        self.flow = Coordinator(settings)
        self.load = load
        self.plans = list(plans)
        self.now = 0.0
        self.record = Record(settings.drafters)
        self.outcome = Outcome()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._idle: deque[int] = deque(range(settings.targets))
        self._starved: set[int] = set()
        self._dealt: dict[int, int] = {}
        self._heard = (-1, -1)
        self._busy_window: Window | None = None
        self._left = 0

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Let something happen: failures, crashes, measurements."""
        self._count += 1
        heapq.heappush(self._events, (when, self._count, what))

    def run(self) -> Outcome:
        """Until nothing happens any more. Raises FlowFailed where the flow fails."""
        self._feed()
        self._wake()
        while self._events:
            self.now, _, what = heapq.heappop(self._events)
            what()
            self._wake()
        assert self.flow.closed, f"the simulation ran dry: {self.flow.stats(self.now)}"
        self.outcome.seconds = self.now
        self.outcome.stats = self.flow.stats(self.now)
        return self.record.into(self.outcome)

    def _feed(self) -> None:
        """The next epoch's plan is there when this one's last fresh job is leased."""
        flow = self.flow
        while flow.next_epoch < len(self.plans):
            if flow.epochs and flow.epochs[-1].ledger.fresh is not None:
                return
            flow.add_epoch(self.plans[flow.next_epoch])
        if not flow.closed:
            flow.no_more_epochs()

    def _wake(self) -> None:
        """Ask again, as long as there is news, on behalf of everyone who was told to wait."""
        flow = self.flow
        while (flow.news_for_producers, flow.news_for_consumers) != self._heard:
            self._heard = (flow.news_for_producers, flow.news_for_consumers)
            if flow.next_epoch < len(self.plans):
                self._feed()
            self._lease_all()
            if self._busy_window is None and not flow.closed:
                got = flow.try_draw(self.now)
                if isinstance(got, Window):
                    self._train(got)

    def _lease_all(self) -> None:
        flow = self.flow
        shared = flow.settings.dispatch == "shared"
        if not shared:
            self._feed_starved()
        for _ in range(len(self._idle)):
            worker = self._idle.popleft()
            got = flow.try_lease(worker, self.now)
            if isinstance(got, Lease):
                self._extract(got)
            elif isinstance(got, Wait):
                starved = not shared and got.reason == "producer_wait_work"
                (self._starved.add if starved else self._idle.append)(worker)
                if not starved:
                    return  # nobody else finds work or room either

    def _feed_starved(self) -> None:
        """Targets whose own queue was empty ask again when prefetch has dealt to it, or when a job came back."""
        for epoch in self.flow.epochs:
            seen = self._dealt.get(epoch.number, 0)
            self._dealt[epoch.number] = epoch.next_dealt
            fed = {job % len(epoch.dealt) for job in range(seen, epoch.next_dealt)} & self._starved
            if epoch.ledger.returned:
                fed = set(self._starved)
            self._starved -= fed
            self._idle.extend(sorted(fed))

    def _extract(self, lease: Lease) -> None:
        seconds = self.load.produce(lease.job, lease.worker)
        if self.load.silent(lease.job, lease.attempt):
            self.at(lease.expires, self._expire)
            seconds = lease.expires - self.now + seconds
        self.record.last_lease = self.now
        self.record.targets.append((self.now, self.now + seconds))
        self.at(self.now + seconds, lambda: self._answer(lease))

    def _expire(self) -> None:
        self.flow.expire(self.now)

    def _answer(self, lease: Lease) -> None:
        if self.load.fails(lease.job, lease.attempt):
            self.flow.lease_failed(lease, "failed in the simulation")
        else:
            self.flow.put(lease)
        self._idle.append(lease.worker)
        self._heard = (-1, -1)  # whoever is free now asks without news

    def _train(self, window: Window) -> None:
        if self.record.first_draw is None:
            self.record.first_draw = self.now
        self._busy_window = window
        self.outcome.windows.append(window)
        self._left = sum(bool(part) for part in window.parts)
        for replica, part in enumerate(window.parts):
            if part:
                self._micro_step(window, replica, part, 0)

    def _micro_step(self, window: Window, replica: int, part: tuple[int, ...], place: int) -> None:
        seconds = self.load.consume(part[place], replica)
        self.record.drafters.append((self.now, self.now + seconds))
        self.at(self.now + seconds, lambda: self._release(window, replica, part, place))

    def _release(self, window: Window, replica: int, part: tuple[int, ...], place: int) -> None:
        self.flow.release(window.epoch, part[place])
        if place + 1 < len(part):
            self._micro_step(window, replica, part, place + 1)
            return
        self._left -= 1
        if self._left == 0:
            self.record.steps.append((self.now, self.now + self.load.step_s))
            self.at(self.now + self.load.step_s, lambda: self._land(window))

    def _land(self, window: Window) -> None:
        self._busy_window = None
        self._heard = (-1, -1)
        if self.load.skips(window.number):
            self.flow.skip(window, "skipped in the simulation")
        else:
            self.flow.commit(window)
            self.outcome.committed += [(window.epoch, job) for job in window.jobs]


def simulate(settings: FlowSettings, plans: Sequence[EpochPlan], load: Load) -> Outcome:
    """Run the plans to their end on a virtual clock."""
    return Simulation(settings, plans, load).run()
