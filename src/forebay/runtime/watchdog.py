"""Looking in on a run from beside it: long waits, expired leases, stalls, the status file; and the stop by signal.

Guarantees: the watchdog names waits over ten seconds, returns the jobs of silent workers, dumps all stacks when nothing
has moved for `stall_s`, and ends the run where that is because a worker never came back. SIGINT or SIGTERM ask for a
stop in good order; a second signal stops at once. Called by `runtime.threads` and the runs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from forebay.errors import ForebayError
from forebay.observe.clock import Clocks, in_words
from forebay.runtime.shell import FlowShell

LONG_WAIT_S = 10.0  # a wait that is longer is said
END_S = 30.0  # how long its end may take
PERIOD_S = 1.0  # how often the watchdog looks in, unless a limit is so short that it must look more often


class Watchdog:
    """One thread that looks in: stop asked for, expired leases, long waits, stalls, the status file."""

    def __init__(
        self,
        shell: FlowShell,
        clocks: Clocks,
        *,
        stall_s: float = 900.0,
        long_wait_s: float = LONG_WAIT_S,
        say: Callable[[str], None] = print,
        stacks: Path | None = None,
        status: Callable[[], None] = lambda: None,
    ) -> None:
        self._shell, self._clocks, self._say, self._status = shell, clocks, say, status
        self._stall_s, self._long_wait_s, self._stacks = stall_s, long_wait_s, stacks
        self._period_s = min(PERIOD_S, stall_s / 4, long_wait_s / 4, shell.lease_s / 4)
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # its put may be called in a signal handler
        self._ended = self._stop_requested = False
        self._said: set[tuple[str, float]] = set()
        self._dumped_at = 0.0
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask_stop(self) -> None:
        """Safe in a signal handler: takes no lock that the main thread may hold."""
        self._shell.ask_stop()
        self._wake.put(None)

    @property
    def stop_asked(self) -> bool:
        return self._shell.stop_asked

    def end(self) -> None:
        self._ended = True
        self._wake.put(None)
        self._thread.join(END_S)

    def _watch(self) -> None:
        try:
            while not self._ended:
                self._look()
                with contextlib.suppress(queue.Empty):
                    self._wake.get(timeout=self._period_s)
        except BaseException as error:  # noqa: BLE001 - without a watchdog a run could wait for ever
            self._shell.fail(error)

    def _look(self) -> None:
        if self.stop_asked and not self._stop_requested:
            self._stop_requested = True
            self._shell.request_stop()
        for lease in self._shell.expire_leases():
            job = f"job {lease.job} of epoch {lease.epoch}"
            self._say(f"target {lease.worker} was silent past its lease: {job} goes to another")
        for worker in self._clocks.workers:
            wait = worker.open
            if wait is not None and (age := time.monotonic() - wait[1]) > self._long_wait_s:
                mark = (worker.name, wait[1])
                if mark not in self._said:
                    self._said.add(mark)
                    if not self._shell.evaluating:  # then everyone waits, and the evaluation speaks for itself
                        self._say(f"{worker.name} has been waiting {age:.0f} s for {in_words(wait[0])}")
        still = time.monotonic() - self._shell.last_moved
        if still > self._stall_s and not self._shell.evaluating and self._shell.last_moved != self._dumped_at:
            self._dumped_at = self._shell.last_moved
            self._stalled(still)
        self._status()

    def _stalled(self, still: float) -> None:
        waits = ", ".join(f"{w['worker']} for {in_words(str(w['waits_for']))}" for w in self._clocks.open_waits())
        line = f"nothing has moved for {still:.0f} s (waiting: {waits or 'nobody'})"
        if self._stacks is not None:
            with contextlib.suppress(OSError), open(self._stacks, "a", encoding="utf-8") as file:
                file.write(f"{line}\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
                line += f": all stacks are in {self._stacks}"
        self._say(line)
        drafter_waits = any(w.stage == "drafter" and w.open is not None for w in self._clocks.workers)
        if drafter_waits and (hung := self._shell.hung()):
            named = ", ".join(f"job {x.job} of epoch {x.epoch} on target {x.worker}" for x in hung)
            self._shell.fail(
                ForebayError(
                    f"a target never came back ({named}), and nothing has moved for {still:.0f} s "
                    f"(runtime.stall_s {self._stall_s:g}): find out from {self._stacks} where it hangs"
                )
            )


@contextlib.contextmanager
def signals(watchdog: Watchdog, say: Callable[[str], None]) -> Iterator[None]:
    """First SIGINT/SIGTERM: stop in good order. Second: leave at once (128 + its number). Main thread only; nests."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, frame: Any) -> None:
        if watchdog.stop_asked:
            os._exit(128 + number)
        os.write(2, b"\nstopping: finishing the window, then a checkpoint (a second signal stops at once)\n")
        watchdog.ask_stop()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
