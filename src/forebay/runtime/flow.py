"""The flow of a run: the coordinator, and what its decisions are about (items or handles to them, failures, the end).

Guarantees: every decision is the coordinator's; an item is held from its put to its last draw and handed back once;
the first cause of a failure is kept. It neither waits nor locks: a method answers at once, with a `Wait` where there is
nothing yet. The shells make the calls atomic and do the waiting: `runtime.shell` for threads, `runtime.ray` for actors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from forebay.errors import Stopped
from forebay.flow.coordinator import Coordinator, Lease, Wait, Window
from forebay.stages.flow import Key


class Flow:
    """See the module's docstring. `on_discard` gets the items that nobody will draw."""

    def __init__(self, coordinator: Coordinator, on_discard: Callable[[Any], None] = lambda item: None) -> None:
        self.coordinator, self.discard = coordinator, on_discard
        self.items: dict[Key, Any] = {}
        self.failures: list[str] = []  # what went wrong with jobs, newest last, for the run report
        self.cause: BaseException | None = None
        self.stopping = False
        self.drained = False  # no job will ever be leased again
        self.leases_held = False  # while the drafter itself uses a target, workers may have to wait

    def check(self) -> None:
        """Raise Stopped once the run has failed."""
        if self.cause is not None:
            raise Stopped

    # -- targets -----------------------------------------------------------------------------------------------------

    def lease(self, worker: int) -> Lease | Wait | None:
        self.check()
        if self.stopping:
            return None
        result = self.coordinator.try_lease(worker, time.monotonic())
        self.drained |= result is None
        return result

    def put(self, lease: Lease, item: Any) -> None:
        if self.cause is not None:
            self.discard(item)
            raise Stopped
        if self.coordinator.put(lease):
            self.items[lease.epoch, lease.job] = item
        else:
            self.discard(item)  # at once: a refused answer's room may be leased next

    def job_failed(self, lease: Lease, error: BaseException) -> None:
        self.check()
        outcome = self.coordinator.lease_failed(lease, f"{type(error).__name__}: {error}")
        self.failures.append(
            f"epoch {lease.epoch} job {lease.job} attempt {lease.attempt} on target {lease.worker}: "
            f"{type(error).__name__}: {error} -> {outcome}"
        )
        self._adopt_failure(error)

    def expire(self) -> list[Lease]:
        """Return the jobs of workers that were silent past their lease."""
        if self.cause is not None or self.leases_held:
            return []
        lost = self.coordinator.expire(time.monotonic())
        self.failures += [f"epoch {x.epoch} job {x.job}: target {x.worker} silent past its lease" for x in lost]
        self._adopt_failure()
        return lost

    def hold_leases(self, held: bool) -> None:
        """No lease expires while they are held; all count anew from when they are not."""
        if not held:
            self.coordinator.renew_all(time.monotonic())
        self.leases_held = held

    # -- drafters ----------------------------------------------------------------------------------------------------

    def draw(self) -> tuple[Window, list[list[Any]]] | Wait | None:
        self.check()
        if self.stopping:
            return None
        window = self.coordinator.try_draw(time.monotonic())
        if isinstance(window, Window):
            return window, [[self._take(window, job) for job in part] for part in window.parts]
        return window

    def _take(self, window: Window, job: int) -> Any:
        """Kept here too, until its last use."""
        key = (window.epoch, job)
        return self.items.pop(key) if job in window.last else self.items[key]

    def skip(self, window: Window, reason: str) -> None:
        for job in window.jobs:  # computed again, whatever uses they had left
            if (window.epoch, job) in self.items:
                self.discard(self.items.pop((window.epoch, job)))
        self.coordinator.skip(window, reason)
        self.failures.append(f"step {window.step} skipped ({reason}): jobs {sorted(window.jobs)} return")
        self._adopt_failure()

    # -- ending and looking in ---------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        self.stopping = True
        self.coordinator.finish()

    def fail(self, cause: BaseException) -> None:
        if self.cause is None:
            self.cause = cause
            self.coordinator.fail(cause)

    def _adopt_failure(self, error: BaseException | None = None) -> None:
        """The coordinator may decide that the run cannot go on (poison, two hangs): that is then the first cause."""
        if self.cause is None and self.coordinator.cause is not None:
            self.cause = self.coordinator.cause
            self.cause.__cause__ = error

    def stats(self) -> dict[str, Any]:
        coordinator = self.coordinator
        quarantined = sum(len(jobs) for jobs in coordinator.quarantined.values())  # over all lives of the run
        return {**coordinator.stats(time.monotonic()), "jobs_quarantined": quarantined}

    def items_left(self) -> list[Any]:
        items = list(self.items.values())
        self.items.clear()
        return items
