"""A seeded scheduler picks which actor moves next: the guarantees must hold in every interleaving.

Each run is a small world of up to 12 jobs with random settings: workers that lease, answer, fail, hang and answer too
late; a training loop that draws, releases, commits and skips; crashes with a resume from the last step boundary. In
half of them every job is used two or three times. An
actor that was told to wait asks again only when the coordinator's news say so: a lost wake-up shows as a deadlock.

Asserted in each: G1 each use exactly once, G2 bounded bytes, G3 no deadlock, G4 nothing stranded, F26 residence =
occupancy.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import cache

import pytest

from forebay.flow.coordinator import Coordinator, FlowSettings, Lease, Window
from forebay.flow.plan import EpochPlan
from forebay.flow.simulate import plan_of_jobs

RUNS = 60_000
SHARDS = 10
DESIGNS = (
    ("shared", "buffered", "live"),
    ("shared", "buffered", "planned"),
    ("shared", "bucketed", "live"),
    ("shared", "per_drafter", "live"),
    ("per_target", "buffered", "live"),
)
WINDOWS = ((1, 1), (1, 3), (2, 1), (2, 4), (3, 2), (4, 5))  # (window, min fill)
MOST_MOVES = 4000


@cache
def plan_of(variant: int, epoch: int, draw: str, window: int, min_fill: int, reuse: int) -> EpochPlan:
    rng = random.Random(variant * 7 + epoch)
    n = rng.choice((1, 2, 3, 4, 5, 6, 6))
    buckets = [rng.randrange(3) for _ in range(n)]
    nbytes = [rng.randint(1, 3) for _ in range(n)] if variant % 2 else 1
    return plan_of_jobs(buckets, epoch, nbytes, draw=draw, window=window, min_fill=min_fill, reuse=reuse)


class World:
    """One run: a coordinator, its actors, and a second book of what they did."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        dispatch, queue, draw = DESIGNS[seed % len(DESIGNS)]
        self.window, min_fill = WINDOWS[rng.randrange(len(WINDOWS))]
        variant = rng.randrange(20)
        self.reuse = rng.choice((1, 1, 2, 3))
        epochs = range(rng.choice((1, 1, 2)))
        self.plans = [plan_of(variant, e, draw, self.window, min_fill, self.reuse) for e in epochs]
        largest = max(int(plan.nbytes.max()) for plan in self.plans)
        # The least that G3 admits, or a little more.
        budget = (max(self.window, min_fill) + 1) * largest + rng.choice((0, 0, 1, 2, 9))
        self.workers = rng.randint(1, 3)
        self.settings = FlowSettings(
            budget_bytes=budget,
            window=self.window,
            min_fill=min_fill,
            targets=self.workers,
            drafters=rng.randint(1, 2),
            dispatch=dispatch,
            queue=queue,
            draw=draw,
            reuse=self.reuse,
            max_attempts=3,
            on_poison="continue",
            lease_s=10.0,
            prefetch_jobs=2,
        )
        self.trouble = rng.random() < 0.6
        self.overlap = rng.random() < 0.7  # the next epoch's plan is there before this one's last job
        self.now = 0.0
        self.committed: dict[int, Counter[int]] = {plan.epoch: Counter() for plan in self.plans}
        self.start(Coordinator(self.settings))
        self.saved = self.flow.snapshot()
        self.saved_committed = {e: Counter(jobs) for e, jobs in self.committed.items()}

    def start(self, flow: Coordinator) -> None:
        """A new process: nobody holds anything."""
        self.flow = flow
        self.leases: list[Lease | None] = [None] * self.workers
        self.hung: Lease | None = None
        self.late: Lease | None = None
        self.held: dict[tuple[int, int, int], int] = {}  # tensors that exist: (epoch, job, attempt) -> bytes
        self.items: dict[tuple[int, int], tuple[int, int, int]] = {}
        self.drawn: Window | None = None
        self.unreleased: list[int] = []
        self.heard = [-1] * self.workers  # news when the worker was last told to wait
        self.heard_draw = -1
        self.gone = [False] * self.workers
        self.residences = {epoch.number: epoch.queue.residence for epoch in flow.epochs}
        self.feed()

    def feed(self) -> None:
        flow = self.flow
        while flow.next_epoch < len(self.plans):
            if flow.epochs and not (self.overlap and flow.epochs[-1].ledger.fresh is None):
                return
            flow.add_epoch(self.plans[flow.next_epoch])
            for epoch in flow.epochs:
                self.residences[epoch.number] = epoch.queue.residence
        if not flow._no_more_epochs:
            flow.no_more_epochs()

    # ---- moves: each returns whether it could be made -----------------------------------------------------------

    def worker_moves(self, worker: int) -> bool:
        flow, lease = self.flow, self.leases[worker]
        if lease is not None:
            self.answer(worker, lease)
            return True
        if self.gone[worker] or self.stuck(worker) or self.heard[worker] == flow.news_for_producers:
            return False
        got = flow.try_lease(worker, self.now)
        if isinstance(got, Lease):
            self.leases[worker] = got
            self.held[got.epoch, got.job, got.attempt] = int(self.plans[got.epoch].nbytes[got.job])
            self.check()
        elif got is None:
            self.gone[worker] = True
        else:
            self.heard[worker] = flow.news_for_producers
        return True

    def answer(self, worker: int, lease: Lease) -> None:
        flow, key = self.flow, (lease.epoch, lease.job, lease.attempt)
        fate = self.rng.random() if self.trouble else 1.0
        self.leases[worker] = None
        if fate < 0.08:
            del self.held[key]
            assert flow.lease_failed(lease, "raised") in ("requeued", "quarantined")
        elif fate < 0.12 and self.hung is None and self.late is None:
            self.hung = lease
        else:
            assert flow.put(lease)
            self.items[lease.epoch, lease.job] = key

    def hung_moves(self) -> bool:
        """A silent worker answers just in time, or loses its lease; its late answer is refused."""
        if self.late is not None:
            lease, self.late = self.late, None
            assert not self.flow.put(lease), "a late put was accepted"
            del self.held[lease.epoch, lease.job, lease.attempt]
            return True
        if self.hung is None:
            return False
        lease, self.hung = self.hung, None
        if self.rng.random() < 0.3:
            self.leases[lease.worker] = lease
            return True
        self.now = lease.expires
        for worker, other in enumerate(self.leases):
            if other is not None:
                self.leases[worker] = self.flow.renew(other, self.now)
        assert self.flow.expire(self.now) == [lease]
        self.late = lease
        return True

    def stuck(self, worker: int) -> bool:
        return any(lease is not None and lease.worker == worker for lease in (self.hung, self.late))

    def consumer_moves(self) -> bool:
        flow, window = self.flow, self.drawn
        if window is None:
            if self.heard_draw == flow.news_for_consumers or flow.closed:
                return False
            got = flow.try_draw(self.now)
            if isinstance(got, Window):
                self.drawn = got
                self.unreleased = list(got.jobs)
                assert sorted(j for part in got.parts for j in part) == sorted(got.jobs)
                assert len(got.parts) == self.settings.drafters and len(got.jobs) <= self.window
                assert len(set(got.jobs)) == len(got.jobs), "one job twice in a window"
                assert got.uses == {j: self.committed[got.epoch][j] for j in got.jobs}, "uses come in their order"
            else:
                self.heard_draw = flow.news_for_consumers
            return True
        if self.unreleased and self.rng.random() < 0.8:
            self.release(window, self.unreleased.pop())
            return True
        skip = self.trouble and self.rng.random() < 0.1
        if self.unreleased and not skip:
            return self.consumer_moves()
        for job in window.jobs if skip else self.unreleased:
            if skip or job in window.last:
                self.held.pop(self.items.pop((window.epoch, job), None), None)
        self.unreleased = []
        self.drawn = None
        if skip:
            assert flow.skip(window, "not finite")
        else:
            assert flow.commit(window)
            self.committed[window.epoch].update(window.jobs)
            assert max(self.committed[window.epoch].values()) <= self.reuse, "trained too often"
        assert not flow.commit(window), "a second commit"
        if self.rng.random() < 0.3:
            self.saved = flow.snapshot()
            self.saved_committed = {e: Counter(jobs) for e, jobs in self.committed.items()}
        return True

    def release(self, window: Window, job: int) -> None:
        """After the job's own micro-step: its item is gone where this was its last use."""
        last = self.committed[window.epoch][job] == self.reuse - 1
        assert (job in window.last) == last
        if last:
            del self.held[self.items.pop((window.epoch, job))]
        assert self.flow.release(window.epoch, job) == last

    def crash(self) -> None:
        self.committed = {e: Counter(jobs) for e, jobs in self.saved_committed.items()}
        self.start(Coordinator.resume(self.settings, self.saved, self.plans.__getitem__))

    # ---- what must hold -----------------------------------------------------------------------------------------

    def check(self) -> None:
        """G1, F20: every job is in one state. G2, F23: what is held is charged, and what is charged fits."""
        for epoch in self.flow.epochs:
            assert sum(epoch.ledger.counts) == epoch.ledger.jobs
        held = sum(self.held.values())
        assert held <= self.flow.admission.charged <= self.settings.budget_bytes

    def run(self) -> None:
        rng = self.rng
        for _ in range(MOST_MOVES):
            if not self.flow._no_more_epochs:
                self.feed()
            if self.flow.closed and self.drawn is None:
                return self.check_end()
            actor = rng.randrange(self.workers + 2)
            if actor < self.workers:
                moved = self.worker_moves(actor)
            elif actor == self.workers:
                moved = self.consumer_moves()
            elif self.trouble and rng.random() < 0.02:
                self.crash()
                moved = True
            else:
                moved = self.hung_moves()
            if not moved and not self.can_move():
                break
        raise AssertionError(f"deadlock, or no end in sight: {self.flow.stats(self.now)}")

    def can_move(self) -> bool:
        flow = self.flow
        if self.drawn is not None or self.hung is not None or self.late is not None:
            return True
        if any(lease is not None for lease in self.leases) or self.heard_draw != flow.news_for_consumers:
            return True
        return any(not g and h != flow.news_for_producers for g, h in zip(self.gone, self.heard, strict=True))

    def check_end(self) -> None:
        flow = self.flow
        assert flow.try_draw(self.now) is None
        for plan in self.plans:
            lost = set(flow.quarantined.get(plan.epoch, {}))
            done = {job for job, uses in self.committed[plan.epoch].items() if uses == self.reuse}
            assert not lost & done and lost | done == set(range(len(plan))), "G1, G4: each use of each job once"
        for residence in self.residences.values():
            assert residence.sum_residence == residence.sum_occupancy, "F26"
            assert not residence.arrived, "G4: nothing is stranded"
        assert flow.admission.charged == sum(self.held.values()), "F09: only what hangs is still charged"


@pytest.mark.parametrize("shard", range(SHARDS))
def test_the_guarantees_hold_in_every_interleaving(shard: int) -> None:
    """G1, G2, G3, G4, F04, F05, F06, F08, F09, F11, F23, F24, F26, F28, F30, F32."""
    for seed in range(shard, RUNS, SHARDS):
        try:
            World(seed).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
