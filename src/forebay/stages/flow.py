"""What the stages see of the flow, wherever a run is: one small interface, kept by every shell around the coordinator.

Guarantees that every implementation keeps, and one set of tests asks of all (`tests/unit/test_shells.py`): a call waits
until the flow has an answer, on the worker's clock and under the wait's name; it answers None when there will be
nothing more; it raises `Stopped` once the run has failed elsewhere. Keys are (epoch, job id).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from forebay.flow.coordinator import Lease, Window
from forebay.observe.clock import WorkerClock

Key = tuple[int, int]
Prepare = Callable[[Key], Any]  # -> a job's host batch


class PrefetchFlow(Protocol):
    """For `stages.prefetch`."""

    def next_to_prepare(self, clock: WorkerClock) -> Key | None:
        """The next job whose host batch is wanted, in plan order."""

    def prepared(self, key: Key, batch: Any) -> None:
        """Hand over a host batch, or the exception that preparing it raised."""


class TargetFlow(Protocol):
    """For `stages.extract`."""

    def lease(self, worker: int, clock: WorkerClock) -> Lease | None:
        """The next job together with its room."""

    def batch(self, lease: Lease, clock: WorkerClock, prepare: Prepare) -> Any:
        """The leased job's host batch: prefetched, or prepared here. Raises what preparing it raised."""

    def put(self, lease: Lease, item: Any) -> None:
        """Hand over a job's item. An answer that comes too late is dropped and counted."""

    def job_failed(self, lease: Lease, error: BaseException) -> None:
        """A job's attempt failed: it is tried again, or quarantined and the run goes on or stops (`on_poison`)."""


class DrafterFlow(Protocol):
    """For `stages.train`."""

    def draw(self, clock: WorkerClock) -> tuple[Window, list[list[Any]]] | None:
        """A window and its items, dealt to the replicas that this caller steps."""

    def release(self, epoch: int, job: int) -> None:
        """The job's item is no longer needed: its room is free."""

    def commit(self, window: Window) -> None:
        """The window's step is in the weights."""

    def skip(self, window: Window, reason: str) -> None:
        """The window's step was not taken: its jobs return to PENDING with one attempt more."""
