"""One epoch at run time: its ledger, its queue, and how its jobs are dispatched. Owned and called by the coordinator.

Guarantees: jobs are offered in plan order, those that came back before the fresh ones; under `draw: planned` jobs that
lost their place come after all others, so that they hold no room that a planned window needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Hashable
from typing import Any

from forebay.errors import ConfigError, ContractError
from forebay.flow.jobs import EpochPlan
from forebay.flow.ledger import DRAWN, PENDING, Lease, Ledger
from forebay.flow.mixing import Meter
from forebay.flow.queues import BucketedHSQueue, BufferedHSQueue, Drawn, HSQueue, PerDrafterHSQueue, PlannedHSQueue
from forebay.flow.random import CounterRandom
from forebay.flow.settings import FlowSettings


class Epoch:
    """`to_come[b]`: jobs of bucket b that are neither ready nor beyond; `draws`: windows drawn, also those skipped."""

    def __init__(self, plan: EpochPlan, settings: FlowSettings, state: dict[str, Any] | None) -> None:
        self.plan = plan
        self.number = plan.epoch
        if plan.params.reuse != settings.reuse:
            raise ContractError(
                f"the plan of epoch {plan.epoch} was made for {plan.params.reuse} uses of each item, this run has "
                f"buffer.reuse {settings.reuse}: resume with the reuse that the run was started with"
            )
        self.ledger = Ledger(plan.epoch, len(plan), settings.max_attempts, settings.reuse)
        self.draws = 0
        self.used_at: dict[int, int] = {}  # with reuse: the draw at which a job was last used
        self.buckets: bytes = plan.buckets.tobytes()
        self.to_come = [self.buckets.count(b) for b in range(len(plan.params.bucket_edges))]
        self.meter = Meter(self.to_come, plan.windows)
        self.dealt: list[deque[int]] = []
        if settings.dispatch == "per_target":
            self.dealt = [deque() for _ in range(settings.targets)]
        self.depth = settings.prefetch_jobs
        self.next_dealt = 0
        self.queue = self._queue(settings)
        if state is not None:
            self._restore(state)
        if self.dealt:
            self._deal()

    def _queue(self, s: FlowSettings) -> HSQueue:
        if s.queue == "bucketed":
            return BucketedHSQueue(len(self.to_come))
        if s.queue == "per_drafter":
            return PerDrafterHSQueue(s.drafters)
        if s.draw == "planned":
            if self.plan.draw_order is None:
                raise ConfigError("draw: planned needs a plan that was made with draw: planned: plan the epoch again")
            return PlannedHSQueue(self.plan.draw_order, s.window, self.ledger.uses)
        return BufferedHSQueue(CounterRandom(s.seed, self.number), s.min_fill, s.max_age, self.ledger.uses)

    def _restore(self, state: dict[str, Any]) -> None:
        self.ledger.restore(state, state["deferred"])
        self.draws = state["draws"]
        for job in range(len(self.plan)):
            if self.ledger.state[job] != PENDING:
                self.to_come[self.buckets[job]] -= 1
        if isinstance(self.queue, PlannedHSQueue):
            self.queue.restore()
            for job in self.ledger.quarantined():
                self.queue.drop(job)
        for job in state["deferred"]:
            self.defer(job)

    def snapshot(self) -> dict[str, Any]:
        deferred = list(self.queue.deferred) if isinstance(self.queue, PlannedHSQueue) else []
        return {**self.ledger.snapshot(), "draws": self.draws, "deferred": deferred}

    def next_job(self, worker: int | None, rooms: Container[Hashable]) -> int | None:
        """The job to lease next, by this worker or (None) by any: one that has its room before one that needs room."""
        ledger = self.ledger
        if ledger.returned:
            return next((job for job in ledger.returned if (self.number, job) in rooms), ledger.returned[0])
        fresh = ledger.fresh if not self.dealt else self._fresh_of(worker)
        if fresh is None and ledger.late and ledger.fresh is None:
            return ledger.late[0]
        return fresh

    def _fresh_of(self, worker: int | None) -> int | None:
        mine = self.dealt if worker is None else [self.dealt[worker % len(self.dealt)]]
        return next((lane[0] for lane in mine if lane), None)

    def _deal(self) -> None:
        """`dispatch: per_target`: prefetch fills the targets' queues in turn and stops at the first that is full."""
        ledger, lanes = self.ledger, self.dealt
        while self.next_dealt < ledger.jobs:
            if ledger.waits_its_turn(self.next_dealt):
                lane = lanes[self.next_dealt % len(lanes)]
                if len(lane) >= self.depth:
                    return
                lane.append(self.next_dealt)
            self.next_dealt += 1

    def lease(self, job: int, worker: int, expires: float) -> Lease:
        if self.dealt:
            lane = self.dealt[job % len(self.dealt)]
            if lane and lane[0] == job:
                lane.popleft()
                self._deal()
        return self.ledger.lease(job, worker, expires)

    def put(self, job: int) -> None:
        bucket = self.buckets[job]
        self.to_come[bucket] -= 1
        self.ledger.ready(job)
        self.queue.put(job, bucket)

    def take(self, drawn: Drawn) -> float:
        """Mark a window's jobs as drawn; returns its r."""
        for job in drawn.jobs:
            self.ledger.draw(job)
            if self.ledger.uses.reuse > 1:
                self.meter.use(self.draws - self.used_at.pop(job, self.draws))
                self.used_at[job] = self.draws
        self.draws += 1
        return self.meter.window([self.buckets[j] for j in drawn.jobs], drawn.ages, drawn.occupancy, drawn.forced)

    def commit(self, job: int) -> bool:
        """One more use is in the weights; returns whether it was the job's last. Else its item is there again."""
        if self.ledger.commit(job):
            self.used_at.pop(job, None)
            return True
        self.queue.put(job, self.buckets[job])
        return False

    def defer(self, job: int) -> None:
        """The job loses the place that the plan gave it, if the plan gave it one."""
        if isinstance(self.queue, PlannedHSQueue):
            self.queue.defer(job)

    def back(self, job: int, reason: str) -> bool:
        """A leased or drawn job did not succeed. Returns whether it is pending again (else quarantined)."""
        planned = self.queue if isinstance(self.queue, PlannedHSQueue) else None
        was_ready = self.ledger.state[job] == DRAWN
        again = self.ledger.back(job, reason, late=planned is not None and job in planned.deferred)
        self.to_come[self.buckets[job]] += int(again and was_ready) - int(not again and not was_ready)
        if planned is not None and not again:
            planned.drop(job)
        return again
