"""The thread shell around the coordinator: one lock, one condition variable, the items' tensors.

Guarantees: every decision is the coordinator's (a pure state machine); this class only waits, wakes and holds what
the decisions are about. The lock is never held across a tensor operation. The first failure wins: `fail` wakes every
waiter and each of them leaves with `Stopped`. After `request_stop` nothing more is leased or drawn, and the window in
hand can still be committed. Every wait has a name, on the worker's clock.

Called by the stages' loops through `runtime.local`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from forebay.errors import Stopped
from forebay.flow.coordinator import Coordinator, Lease, Wait, Window
from forebay.observe.clock import WorkerClock

Key = tuple[int, int]  # (epoch, job id)


class FlowShell:
    """What the stages see of the flow."""

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        on_discard: Callable[[Any], None] = lambda item: None,
    ) -> None:
        self._coordinator = coordinator
        self._prefetch_jobs = coordinator.settings.prefetch_jobs
        self.lease_s = coordinator.settings.lease_s
        self._discard = on_discard
        self._changed = threading.Condition()
        self._items: dict[Key, Any] = {}
        self._batches: dict[Key, Any] = {}  # prepared host batches, or the error that preparing them raised
        self._preparing: set[Key] = set()
        self._stopping = False
        self.stop_asked = False  # set in a signal handler, which may take no lock; the watchdog then requests the stop
        self._drained = self._leases_held = False
        self.cause: BaseException | None = None
        self.last_moved = time.monotonic()
        self.failures: list[str] = []  # what went wrong with jobs, newest last, for the run report

    # -- waiting ---------------------------------------------------------------------------------------------------

    def _until(self, clock: WorkerClock, attempt: Callable[[], Any]) -> Any:
        """Call `attempt` under the lock until it gives something other than a Wait."""
        with self._changed:
            while True:
                if self.cause is not None:
                    raise Stopped
                result = attempt()
                if not isinstance(result, Wait):
                    self._moved()
                    return result
                with clock.waiting(result.reason):
                    self._changed.wait()

    def _moved(self) -> None:
        self.last_moved = time.monotonic()
        self._changed.notify_all()

    # -- prefetch --------------------------------------------------------------------------------------------------

    def next_to_prepare(self, clock: WorkerClock) -> Key | None:
        """The next job whose host batch is wanted, in plan order; None when there will be no more."""

        def attempt() -> Key | Wait | None:
            if self.stopping or self._drained:
                return None
            for key in self._coordinator.upcoming(self._prefetch_jobs):
                if key not in self._batches and key not in self._preparing:
                    self._preparing.add(key)
                    return key
            return Wait("jobs")

        return self._until(clock, attempt)

    def prepared(self, key: Key, batch: Any) -> None:
        """Hand over a host batch (or the exception that preparing it raised)."""
        with self._changed:
            self._preparing.discard(key)
            self._batches[key] = batch
            self._moved()

    def batch(self, lease: Lease, clock: WorkerClock, prepare: Callable[[Key], Any]) -> Any:
        """The leased job's host batch: prefetched, or prepared here (a retry's, or one that prefetch has not begun)."""
        key = (lease.epoch, lease.job)

        def attempt() -> Any:
            if key in self._batches:
                return self._batches.pop(key)
            return Wait("prefetch") if key in self._preparing else None

        batch = self._until(clock, attempt)
        if batch is None:
            batch = prepare(key)
        if isinstance(batch, BaseException):
            raise batch
        return batch

    # -- targets ---------------------------------------------------------------------------------------------------

    def lease(self, worker: int, clock: WorkerClock) -> Lease | None:
        """The next job together with its room; None when there is no more work."""

        def attempt() -> Lease | Wait | None:
            if self.stopping:
                return None
            result = self._coordinator.try_lease(worker, time.monotonic())
            if result is None:
                self._drained = True
            return result

        return self._until(clock, attempt)

    def put(self, lease: Lease, item: Any) -> bool:
        """Hand over a job's item. False: the answer came too late (another attempt owns the job) and was dropped."""
        with self._changed:
            if self.cause is not None:
                self._discard(item)
                raise Stopped
            accepted = self._coordinator.put(lease)
            if accepted:
                self._items[lease.epoch, lease.job] = item
            else:
                self._discard(item)  # before the lock is free: a refused answer's room may be leased at once
            self._moved()
        return accepted

    def job_failed(self, lease: Lease, error: BaseException) -> None:
        """A job's attempt failed: it is tried again, or quarantined and the run goes on or stops (`on_poison`)."""
        with self._changed:
            if self.cause is not None:
                raise Stopped
            outcome = self._coordinator.lease_failed(lease, f"{type(error).__name__}: {error}")
            self.failures.append(
                f"epoch {lease.epoch} job {lease.job} attempt {lease.attempt} on target {lease.worker}: "
                f"{type(error).__name__}: {error} -> {outcome}"
            )
            self._adopt_failure(error)
            self._moved()

    def _adopt_failure(self, error: BaseException | None = None) -> None:
        """The coordinator may decide that the run cannot go on (poison, two hangs): that is then the first cause."""
        if self.cause is None and self._coordinator.cause is not None:
            self.cause = self._coordinator.cause
            self.cause.__cause__ = error

    def expire_leases(self) -> list[Lease]:
        """Return jobs of workers that were silent past their lease. Called by the watchdog."""
        with self._changed:
            if self.cause is not None or self._leases_held:
                return []
            lost = self._coordinator.expire(time.monotonic())
            for lease in lost:
                self.failures.append(
                    f"epoch {lease.epoch} job {lease.job}: target {lease.worker} silent past its lease"
                )
            if lost:
                self._adopt_failure()
                self._moved()
        return lost

    @property
    def evaluating(self) -> bool:
        """Whether an evaluation has the target, so that the others wait for its end."""
        return self._leases_held

    @contextlib.contextmanager
    def leases_held(self) -> Iterator[None]:
        """While the drafter itself uses a target (an evaluation) workers may have to wait: no lease expires."""
        self._leases_held = True
        try:
            yield
        finally:
            with self._changed:
                self._coordinator.renew_all(time.monotonic())
                self._leases_held = False

    def hung(self) -> list[Lease]:
        """Attempts that were silent past their lease and have not answered yet."""
        with self._changed:
            return self._coordinator.hung

    # -- drafters --------------------------------------------------------------------------------------------------

    def draw(self, clock: WorkerClock) -> tuple[Window, list[list[Any]]] | None:
        """A window and its items, dealt to the replicas; None when everything is trained or a stop was asked for."""

        def attempt() -> Any:
            if self.stopping:
                return None
            window = self._coordinator.try_draw(time.monotonic())
            if isinstance(window, Window):
                return window, [[self._items.pop((window.epoch, job)) for job in part] for part in window.parts]
            return window

        return self._until(clock, attempt)

    def release(self, epoch: int, job: int) -> None:
        """The job's item is no longer needed: its room is free."""
        with self._changed:
            self._coordinator.release(epoch, job)
            self._moved()

    def commit(self, window: Window) -> None:
        """The window's step is in the weights."""
        with self._changed:
            self._coordinator.commit(window)
            self._moved()

    def skip(self, window: Window, reason: str) -> None:
        """The window's step was not taken: its jobs return to PENDING with one attempt more."""
        with self._changed:
            self._coordinator.skip(window, reason)
            self.failures.append(f"step {window.step} skipped ({reason}): jobs {sorted(window.jobs)} return")
            self._adopt_failure()
            self._moved()

    # -- ending and looking in ----------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Lease and draw nothing more. The window in hand may be finished and committed."""
        with self._changed:
            self._stopping = True
            self._coordinator.finish()
            self._moved()

    def fail(self, cause: BaseException) -> None:
        """Stop everyone. The first cause is kept."""
        with self._changed:
            if self.cause is None:
                self.cause = cause
                self._coordinator.fail(cause)
            self._moved()

    def snapshot(self) -> dict[str, Any]:
        """The coordinator's state for a checkpoint, taken at a step boundary."""
        with self._changed:
            return self._coordinator.snapshot()

    def stats(self) -> dict[str, Any]:
        """Counters and gauges of the flow, now."""
        with self._changed:
            return self._coordinator.stats(time.monotonic())

    def items_left(self) -> list[Any]:
        """Items that were never drawn, handed back for clean-up when the run ends."""
        with self._changed:
            items = list(self._items.values())
            self._items.clear()
            self._batches.clear()
            return items

    def failed(self) -> bool:
        return self.cause is not None

    @property
    def stopping(self) -> bool:
        return self._stopping or self.stop_asked
