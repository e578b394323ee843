"""Whose turn it is to compute on a device that both roles share.

`alternate`: one role computes at a time, with all cores. `split`: both at once, each with threads of its own.
Guarantees: a wait for the turn is on the waiter's clock under the name `turn`. Called by `runtime.local`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from forebay.observe.clock import WorkerClock


class Turn:
    """A lock that two roles pass to and fro (`shared=True`), or nothing at all."""

    def __init__(self, shared: bool) -> None:
        self._lock = threading.Lock() if shared else None

    @contextlib.contextmanager
    def __call__(self, clock: WorkerClock) -> Iterator[None]:
        if self._lock is None:
            yield
            return
        if not self._lock.acquire(blocking=False):
            with clock.waiting("turn"):
                self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()
