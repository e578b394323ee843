"""Whose turn it is to compute on a device that both roles share.

`alternate`: one role computes at a time, with all cores. `split`: both at once, each with threads of its own.
Guarantees: a wait for the turn is on the waiter's clock under the name `turn`, and ends soon after the run has failed,
also where the one whose turn it is never comes back. Called by the runtimes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from forebay.errors import Stopped
from forebay.observe.clock import WorkerClock

FAILED_S = 0.5  # how often a waiter looks whether the run has failed: the holder cannot be made to tell it


class Turn:
    """A lock that two roles pass to and fro (`shared=True`), or nothing at all."""

    def __init__(self, shared: bool, failed: Callable[[], bool] = lambda: False) -> None:
        self._lock = threading.Lock() if shared else None
        self._failed = failed

    @contextlib.contextmanager
    def __call__(self, clock: WorkerClock) -> Iterator[None]:
        if self._lock is None:
            yield
            return
        if not self._lock.acquire(blocking=False):
            with clock.waiting("turn"):
                while not self._lock.acquire(timeout=FAILED_S):
                    if self._failed():
                        raise Stopped
        try:
            yield
        finally:
            self._lock.release()
