"""The thread shell around a run's flow: one lock, one condition variable, and the host batches prepared ahead.

Guarantees: the lock is never held across a tensor operation. The first failure wins: `fail` wakes every waiter and each
of them leaves with `Stopped`. After `request_stop` nothing more is leased or drawn, and the window in hand can still be
committed. Every wait has a name, on the worker's clock. Keeps the interfaces of `stages.flow`.

Called by the stages' loops through `runtime.threads`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from forebay.flow.coordinator import Coordinator, Lease, Wait, Window
from forebay.observe.clock import WorkerClock
from forebay.runtime.flow import Flow
from forebay.stages.flow import Key, Prepare


class FlowShell:
    """What the threads of one process see of the flow."""

    def __init__(self, coordinator: Coordinator, *, on_discard: Callable[[Any], None] = lambda item: None) -> None:
        self.flow = Flow(coordinator, on_discard)
        self.lease_s = coordinator.settings.lease_s
        self._changed = threading.Condition()
        self._batches: dict[Key, Any] = {}  # prepared host batches, or the error that preparing them raised
        self._preparing: set[Key] = set()
        self.stop_asked = False
        self.last_moved = time.monotonic()

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _until(self, clock: WorkerClock, attempt: Callable[[], Any]) -> Any:
        """Call `attempt` under the lock until it gives something other than a Wait."""
        with self._changed:
            while True:
                self.flow.check()
                result = attempt()
                if not isinstance(result, Wait):
                    self._moved()
                    return result
                with clock.waiting(result.reason):
                    self._changed.wait()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        with self._changed:
            try:
                yield
            finally:
                self._moved()

    def _moved(self) -> None:
        self.last_moved = time.monotonic()
        self._changed.notify_all()

    # -- prefetch ----------------------------------------------------------------------------------------------------

    def next_to_prepare(self, clock: WorkerClock) -> Key | None:
        def attempt() -> Key | Wait | None:
            if self.flow.stopping or self.flow.drained:
                return None
            coordinator = self.flow.coordinator
            for key in coordinator.upcoming(coordinator.settings.prefetch_jobs):
                if key not in self._batches and key not in self._preparing:
                    self._preparing.add(key)
                    return key
            return Wait("jobs")

        return self._until(clock, attempt)

    def prepared(self, key: Key, batch: Any) -> None:
        with self._changing():
            self._preparing.discard(key)
            self._batches[key] = batch

    def batch(self, lease: Lease, clock: WorkerClock, prepare: Prepare) -> Any:
        """Prepared here: a retry's, or one that prefetch has not begun."""
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

    # -- targets -----------------------------------------------------------------------------------------------------

    def lease(self, worker: int, clock: WorkerClock) -> Lease | None:
        return self._until(clock, lambda: self.flow.lease(worker))

    def put(self, lease: Lease, item: Any) -> None:
        with self._changing():
            self.flow.put(lease, item)

    def job_failed(self, lease: Lease, error: BaseException) -> None:
        with self._changing():
            self.flow.job_failed(lease, error)

    def expire_leases(self) -> list[Lease]:
        """Return jobs of workers that were silent past their lease. Called by the watchdog."""
        with self._changed:
            lost = self.flow.expire()
            if lost:
                self._moved()
        return lost

    @property
    def evaluating(self) -> bool:
        """Whether an evaluation has the target, so that the others wait for its end."""
        return self.flow.leases_held

    @contextlib.contextmanager
    def leases_held(self) -> Iterator[None]:
        """While the drafter itself uses a target (an evaluation) workers may have to wait: no lease expires."""
        self.flow.hold_leases(True)
        try:
            yield
        finally:
            with self._changed:
                self.flow.hold_leases(False)

    def hung(self) -> list[Lease]:
        """Attempts that were silent past their lease and have not answered yet."""
        with self._changed:
            return self.flow.coordinator.hung

    # -- drafters ----------------------------------------------------------------------------------------------------

    def draw(self, clock: WorkerClock) -> tuple[Window, list[list[Any]]] | None:
        return self._until(clock, self.flow.draw)

    def release(self, epoch: int, job: int) -> None:
        with self._changing():
            self.flow.coordinator.release(epoch, job)

    def commit(self, window: Window) -> None:
        with self._changing():
            self.flow.coordinator.commit(window)

    def skip(self, window: Window, reason: str) -> None:
        with self._changing():
            self.flow.skip(window, reason)

    # -- ending and looking in ---------------------------------------------------------------------------------------

    def ask_stop(self) -> None:
        """From a signal handler, which may take no lock: the watchdog then requests the stop."""
        self.stop_asked = self.flow.stopping = True

    def request_stop(self) -> None:
        """Lease and draw nothing more. The window in hand may be finished and committed."""
        with self._changing():
            self.flow.request_stop()

    def fail(self, cause: BaseException) -> None:
        """Stop everyone. The first cause is kept."""
        with self._changing():
            self.flow.fail(cause)

    def snapshot(self) -> dict[str, Any]:
        """The coordinator's state for a checkpoint, taken at a step boundary."""
        with self._changed:
            return self.flow.coordinator.snapshot()

    def stats(self) -> dict[str, Any]:
        """Counters and gauges of the flow, now."""
        with self._changed:
            return self.flow.stats()

    def items_left(self) -> list[Any]:
        """Items that were never drawn, handed back for clean-up when the run ends."""
        with self._changed:
            self._batches.clear()
            return self.flow.items_left()

    def failed(self) -> bool:
        return self.flow.cause is not None

    @property
    def cause(self) -> BaseException | None:
        return self.flow.cause

    @property
    def failures(self) -> list[str]:
        return self.flow.failures

    @property
    def stopping(self) -> bool:
        return self.flow.stopping
