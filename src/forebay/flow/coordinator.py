"""The coordinator: plan, ledger, admission and queue of a run behind one interface, for threads, actors, simulators.

Guarantees G1 to G4 of the design: exactly once (with reuse k: each of a job's k uses exactly once), bounded bytes (an
item's room is freed after its last use), no deadlock, nothing stranded. What cannot be served
now is answered with `Wait(reason)`, what will never come with None; anything late, double or after the end is refused
and counted. A pure state machine: no locks, no clocks (callers pass `now`), no threads, no tensors. Calls are not
atomic by themselves: the shell around it (a lock, an actor, a simulated clock) makes them so.

Protocol: workers `try_lease` -> compute -> `put` | `lease_failed`; one training loop `try_draw` -> `release` each item
after its own micro-step -> `commit` | `skip`. One window is in flight at a time. After a call, whoever was told to wait
need ask again only if `news_for_producers` or `news_for_consumers` has grown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forebay.errors import PoisonError
from forebay.flow.admission import Admission, Blocked, check_budget
from forebay.flow.epoch import Epoch
from forebay.flow.jobs import EpochPlan
from forebay.flow.ledger import LEASED, READY, STATES, Lease
from forebay.flow.queues import Drawn
from forebay.flow.settings import (
    WAIT_END,
    WAIT_FILL,
    WAIT_PLAN,
    WAIT_ROOM,
    WAIT_WORK,
    FlowFailed,
    FlowSettings,
    Wait,
    Window,
    deal,
)

__all__ = ["Coordinator", "FlowFailed", "FlowSettings", "Lease", "Wait", "Window"]

CONSUMER = "drafters"
COUNTERS = (
    "leases",
    "stale_puts",
    "requeues",
    "quarantined",
    "expired",
    "skipped_steps",
    "draws",
    "second_commits",
    "second_releases",
    "draws_after_close",
    "epoch_passes",
    "forced_draws",
    "turn_passes",
)


class Coordinator:
    """See the module's docstring. `settings` are fixed for the run; epochs are added as their plans are made."""

    def __init__(self, settings: FlowSettings, start_step: int = 0) -> None:
        self.settings = settings
        self.admission = Admission(settings.budget_bytes)
        self.blocked = Blocked()
        self.epochs: list[Epoch] = []
        self.next_epoch = 0
        self.steps = start_step
        self.in_flight: Window | None = None
        self.cause: BaseException | None = None
        self.warnings: list[str] = []
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.news_for_producers = 0
        self.news_for_consumers = 0
        self.quarantined: dict[int, dict[int, str]] = {}
        self.last: dict[str, Any] = {}
        self._no_more_epochs = False
        self._finished = False
        self._hung: dict[tuple[int, int, int], Lease] = {}
        self._wait_for_room: set[int] = set()
        self._retired = [0] * len(STATES)
        self._closed_reports: list[dict[str, Any]] = []

    # ---- epochs -------------------------------------------------------------------------------------------------

    def add_epoch(self, plan: EpochPlan, state: dict[str, Any] | None = None) -> None:
        """Epochs come in order, each once. `state`: its entry in a snapshot.

        Raises ConfigError where the budget cannot hold the largest items.
        """
        assert not self._no_more_epochs, "an epoch after the last one"
        assert plan.epoch >= self.next_epoch, f"epoch {plan.epoch} comes after {self.next_epoch - 1}"
        s = self.settings
        self.warnings += [
            line
            for line in check_budget(
                s.budget_bytes, int(plan.nbytes.max()), s.min_fill, s.window, s.targets, len(plan), s.max_age, s.reuse
            )
            if line not in self.warnings
        ]
        epoch = Epoch(plan, s, state)
        self.next_epoch = plan.epoch + 1
        self.epochs.append(epoch)
        self.tell_all()
        for job in epoch.ledger.quarantined():
            self.quarantined.setdefault(plan.epoch, {})[job] = epoch.ledger.reasons[job]
        self._retire()

    def no_more_epochs(self) -> None:
        """The end of input of the run: after the epochs at hand, workers and drafters get None."""
        self._no_more_epochs = True
        self.tell_all()

    def finish(self) -> None:
        """Stop early: no more leases and draws; a window in flight can still be committed."""
        self._finished = True
        self.tell_all()

    def fail(self, cause: BaseException) -> None:
        """Every later call raises FlowFailed from the first cause."""
        if self.cause is None:
            self.cause = cause
        self.tell_all()

    def tell_all(self) -> None:
        self.news_for_producers += 1
        self.news_for_consumers += 1

    def _check(self) -> None:
        if self.cause is not None:
            raise FlowFailed(str(self.cause)) from self.cause

    @property
    def closed(self) -> bool:
        """No window will ever be drawn again."""
        return self._finished or (self._no_more_epochs and not self.epochs)

    @property
    def state(self) -> str:
        """FILLING, STEADY, DRAINING, CLOSED or FAILED."""
        if self.cause is not None:
            return "FAILED"
        if self.closed:
            return "CLOSED"
        if not self.epochs:
            return "FILLING"
        epoch = self.epochs[0]
        if epoch.ledger.ended:
            return "DRAINING"
        return "STEADY" if len(epoch.queue) >= max(self.settings.min_fill, self.settings.window) else "FILLING"

    def _retire(self) -> None:
        while self.epochs and self.epochs[0].ledger.complete:
            epoch = self.epochs.pop(0)
            self._retired = [a + b for a, b in zip(self._retired, epoch.ledger.counts, strict=True)]
            self.tell_all()
            self.counters["turn_passes"] += epoch.queue.passes
            self._closed_reports.append({"epoch": epoch.number, **epoch.meter.report()})

    def _epoch(self, number: int) -> Epoch | None:
        return next((epoch for epoch in self.epochs if epoch.number == number), None)

    # ---- producers ----------------------------------------------------------------------------------------------

    def _next(self, worker: int | None) -> tuple[Epoch, int, bool] | None:
        """The next job to lease, of the oldest epoch that has one, and whether it must take room.

        Where that one would have to wait for room, a later epoch's job that came back and has its own goes before it:
        the draw that would free room may wait for just that job.
        """
        first = None
        for epoch in self.epochs:
            job = epoch.next_job(worker, self.admission.rooms)
            if job is None:
                continue
            needs_room = (epoch.number, job) not in self.admission.rooms
            if not needs_room or (first is None and self.admission.fits(int(epoch.plan.nbytes[job]))):
                return epoch, job, needs_room
            first = first or (epoch, job, True)
        return first

    def try_lease(self, worker: int, now: float) -> Lease | Wait | None:
        """The next job in plan order together with its bytes; None when no work will ever come."""
        self._check()
        found = None if self._finished else self._next(worker)
        if found is None:
            if self.closed:
                self.blocked.go(worker, now)
                return None
            self.blocked.wait(worker, WAIT_WORK.reason, now)
            return WAIT_WORK
        epoch, job, needs_room = found
        if needs_room:
            nbytes = int(epoch.plan.nbytes[job])
            if not self.admission.fits(nbytes):
                if worker not in self._wait_for_room:
                    self._wait_for_room.add(worker)
                    self.news_for_consumers += 1
                self.blocked.wait(worker, WAIT_ROOM.reason, now)
                return WAIT_ROOM
            self.admission.charge((epoch.number, job), nbytes)
        self.blocked.go(worker, now)
        self.counters["leases"] += 1
        if epoch.dealt:  # prefetch deals on, perhaps to a target that waits
            self.news_for_producers += 1
        return epoch.lease(job, worker, now + self.settings.lease_s)

    def _live(self, lease: Lease) -> Epoch | None:
        epoch = self._epoch(lease.epoch)
        if epoch is not None and epoch.ledger.live(lease):
            return epoch
        self.counters["stale_puts"] += 1
        hung = (lease.epoch, lease.job, lease.attempt)
        if self._hung.pop(hung, None) is not None:
            self._free(hung)
        return None

    def _free(self, key: tuple[int, ...]) -> bool:
        if not self.admission.free(key):
            return False
        self._wait_for_room.clear()
        self.news_for_producers += 1
        return True

    def renew(self, lease: Lease, now: float) -> Lease | None:
        """A sign of life. None: the lease is lost, and the answer will be refused."""
        epoch = self._epoch(lease.epoch)
        if epoch is None or not epoch.ledger.live(lease):
            return None
        return epoch.ledger.renew(lease, now + self.settings.lease_s)

    def renew_all(self, now: float) -> None:
        """Every lease counts from now on: the workers could not work in the time before."""
        for epoch in self.epochs:
            for lease in list(epoch.ledger.leases.values()):
                epoch.ledger.renew(lease, now + self.settings.lease_s)

    def put(self, lease: Lease) -> bool:
        """The item is there. False: a late answer, refused and counted; the caller drops its item."""
        self._check()
        epoch = self._live(lease)
        if epoch is None:
            return False
        epoch.put(lease.job)
        self.news_for_consumers += 1
        return True

    def lease_failed(self, lease: Lease, reason: str) -> str:
        """The attempt failed: "requeued" (its room is kept), "quarantined" or "stale"."""
        self._check()
        epoch = self._live(lease)
        if epoch is None:
            return "stale"
        return "requeued" if self._back(epoch, lease.job, reason) else "quarantined"

    def _back(self, epoch: Epoch, job: int, reason: str) -> bool:
        self.news_for_producers += 1
        self.news_for_consumers += 1
        if epoch.back(job, reason):
            self.counters["requeues"] += 1
            return True
        self.counters["quarantined"] += 1
        self.quarantined.setdefault(epoch.number, {})[job] = reason
        self._free((epoch.number, job))
        if self.settings.on_poison == "stop":
            self.fail(
                PoisonError(
                    f"job {job} of epoch {epoch.number} failed {epoch.ledger.attempt[job]} times, the last time with: "
                    f"{reason}; mend the cause and resume, or set runtime.on_poison: continue to quarantine such jobs"
                )
            )
        self._retire()
        return False

    def expire(self, now: float) -> list[Lease]:
        """Take back the jobs of silent workers. Their attempts' room stays charged until they answer."""
        lost = [lease for epoch in self.epochs for lease in epoch.ledger.leases.values() if lease.expires <= now]
        for lease in lost:
            epoch = self._epoch(lease.epoch)
            assert epoch is not None
            self.counters["expired"] += 1
            hung = (lease.epoch, lease.job, lease.attempt)
            self.admission.rename((lease.epoch, lease.job), hung)
            self._hung[hung] = lease
            epoch.defer(lease.job)
            self._back(epoch, lease.job, f"worker {lease.worker} was silent for {self.settings.lease_s:g} s")
        if len(self._hung) > 1:
            named = ", ".join(f"job {x.job} of epoch {x.epoch} on worker {x.worker}" for x in self._hung.values())
            self.fail(
                PoisonError(
                    f"{len(self._hung)} attempts hang at once ({named}), and the buffer has one spare item only: "
                    f"find out why the workers hang, or raise runtime.lease_s above {self.settings.lease_s:g}"
                )
            )
        return lost

    @property
    def hung(self) -> list[Lease]:
        """Attempts that lost their lease and have not answered: their room is still charged."""
        return list(self._hung.values())

    def upcoming(self, n: int) -> list[tuple[int, int]]:
        """The next n jobs (epoch, job) that will be leased, for prefetch."""
        out: list[tuple[int, int]] = []
        for epoch in self.epochs:
            ledger = epoch.ledger
            out += [(epoch.number, job) for job in ledger.returned]
            job = ledger.cursor
            while job < ledger.jobs and len(out) < n:
                if ledger.waits_its_turn(job):
                    out.append((epoch.number, job))
                job += 1
            if len(out) >= n:
                break
            out += [(epoch.number, job) for job in ledger.late]
        return out[:n]

    # ---- consumers ----------------------------------------------------------------------------------------------

    def _room_is_short(self) -> bool:
        """The next job to lease would have to wait for room."""
        found = self._next(None)
        return found is not None and found[2] and not self.admission.fits(int(found[0].plan.nbytes[found[1]]))

    def _choose(self) -> tuple[Epoch, Drawn] | None:
        """From the oldest epoch; from the next one where the oldest has nothing and its jobs wait for room."""
        k = self.settings.window
        oldest = self.epochs[0]
        drawn = self._draw_from(oldest, k)
        if drawn is not None:
            return oldest, drawn
        if not self._room_is_short():
            return None
        stalemate = not any(epoch.ledger.counts[LEASED] for epoch in self.epochs)
        if len(oldest.queue) == 0 or stalemate:
            for epoch in self.epochs[1:]:
                drawn = self._draw_from(epoch, k)
                if drawn is not None:
                    self.counters["epoch_passes"] += 1
                    return epoch, drawn
        if stalemate:
            for epoch in self.epochs:
                drawn = epoch.queue.force(k, epoch.draws)
                if drawn is not None:
                    self.counters["forced_draws"] += 1
                    return epoch, drawn
        return None

    def _draw_from(self, epoch: Epoch, k: int) -> Drawn | None:
        return epoch.queue.draw(k, epoch.draws, epoch.ledger.ended, bool(self._wait_for_room), epoch.to_come)

    def try_draw(self, now: float) -> Window | Wait | None:
        """The next window; None when the run's last one was drawn."""
        self._check()
        assert self.in_flight is None, "one window is in flight at a time"
        if self.closed:
            self.counters["draws_after_close"] += 1
            self.blocked.go(CONSUMER, now)
            return None
        chosen = self._choose() if self.epochs else None
        if chosen is None:
            if not self.epochs:
                wait = WAIT_PLAN
            else:
                ledger = self.epochs[0].ledger
                wait = WAIT_END if ledger.fresh is None else WAIT_FILL
            self.blocked.wait(CONSUMER, wait.reason, now)
            return wait
        self.blocked.go(CONSUMER, now)
        epoch, drawn = chosen
        if drawn.parts is None:
            parts = deal(drawn.jobs, [int(epoch.plan.real[job]) for job in drawn.jobs], self.settings.drafters)
        else:
            parts = tuple(tuple(part) for part in drawn.parts)
        uses = epoch.ledger.uses
        window = Window(
            self.steps,
            epoch.number,
            epoch.draws,
            tuple(drawn.jobs),
            parts,
            {job: uses.used[job] for job in drawn.jobs},
            frozenset(job for job in drawn.jobs if uses.left(job) == 1),
            sum(e.ledger.uses.windows(self.settings.window) for e in self.epochs),
        )
        self.counters["draws"] += 1
        self.last = {"r": epoch.take(drawn), "occupancy": drawn.occupancy, "age_max": max(drawn.ages)}
        self.in_flight = window
        return window

    def release(self, epoch: int, job: int) -> bool:
        """After the job's own micro-step: its item's memory is free. False: it stays for another use, or (counted) it
        was free already."""
        window = self.in_flight
        if window is not None and window.epoch == epoch and job in window.uses:
            if job not in window.last:
                return False
            if self._free((epoch, job)):
                return True
        self.counters["second_releases"] += 1
        return False

    def commit(self, window: Window) -> bool:
        """The step with this window's gradient was taken. False (counted): it was committed or skipped already."""
        if not self._land(window):
            return False
        epoch = self._epoch(window.epoch)
        assert epoch is not None
        for job in window.jobs:
            if epoch.commit(job):
                self._free((window.epoch, job))
        if len(window.last) < len(window.jobs):
            self.news_for_consumers += 1
        self.steps += 1
        self._retire()
        return True

    def skip(self, window: Window, reason: str) -> bool:
        """The step was not taken: its jobs are pending again with one attempt more, or quarantined."""
        if not self._land(window):
            return False
        epoch = self._epoch(window.epoch)
        assert epoch is not None
        self.counters["skipped_steps"] += 1
        for job in window.jobs:
            epoch.defer(job)
            self._free((window.epoch, job))
            self._back(epoch, job, reason)
        return True

    def _land(self, window: Window) -> bool:
        if window is not self.in_flight:
            self.counters["second_commits"] += 1
            return False
        self.in_flight = None
        return True

    # ---- looking at it ------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """JSON-able, to be stored with the weights of the same step boundary."""
        assert self.in_flight is None, "snapshot at a step boundary"
        return {
            "version": 1,
            "step": self.steps,
            "next_epoch": self.next_epoch,
            "epochs": [epoch.snapshot() for epoch in self.epochs],
            "quarantined": {str(e): {str(j): why for j, why in jobs.items()} for e, jobs in self.quarantined.items()},
        }

    @classmethod
    def resume(
        cls, settings: FlowSettings, saved: dict[str, Any], load_plan: Callable[[int], EpochPlan]
    ) -> Coordinator:
        """A coordinator that goes on from a snapshot; `next_epoch` is the first that is still to be added."""
        self = cls(settings, start_step=saved["step"])
        self.quarantined = {
            int(e): {int(j): why for j, why in jobs.items()} for e, jobs in saved["quarantined"].items()
        }
        for state in saved["epochs"]:
            self.add_epoch(load_plan(state["epoch"]), state)
        self.next_epoch = saved["next_epoch"]
        return self

    def stats(self, now: float) -> dict[str, Any]:
        """Counters and gauges for metrics, the console and `forebay status`."""
        counts = [sum(column) for column in zip(self._retired, *(e.ledger.counts for e in self.epochs), strict=True)]
        passes = sum(epoch.queue.passes for epoch in self.epochs)
        return {
            "state": self.state,
            "step": self.steps,
            "epochs": [epoch.number for epoch in self.epochs],
            "jobs": dict(zip(STATES, counts, strict=True)),
            "charged_bytes": self.admission.charged,
            "peak_bytes": self.admission.peak,
            "budget_bytes": self.admission.budget,
            "uses_left": sum(epoch.ledger.uses.open for epoch in self.epochs),
            "occupancy": sum(epoch.ledger.counts[READY] for epoch in self.epochs),
            "hung": len(self._hung),
            "blocked_s": self.blocked.until(now),
            "waiting": self.blocked.waiting(),
            **{**self.counters, "turn_passes": self.counters["turn_passes"] + passes},
            "last_window": dict(self.last),
            "mixing": self.mixing(),
        }

    def mixing(self) -> list[dict[str, Any]]:
        """One report per epoch, closed ones first."""
        return [*self._closed_reports, *({"epoch": e.number, **e.meter.report()} for e in self.epochs)]
