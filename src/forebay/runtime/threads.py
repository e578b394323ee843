"""Threads of one process around a run's flow: start the stages' loops, train, end in order.

Guarantees: the first failure is the one raised, and everyone else stops within seconds (G10). The order of an end is
always the same: lease nothing more; finish and commit the window in hand; (the training loop's last act is the
checkpoint); wake every waiter; join the threads, each with a deadline; hand back items never drawn. SIGINT or SIGTERM
starts that order and leaves with a resumable run.

It computes nothing itself: what prepares, extracts and trains is handed in, so that `forebay bench flow` runs these
same loops with timed waits. Called by `runtime.local` and `bench.flow_threads`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from forebay.errors import ForebayError, Stopped
from forebay.observe.clock import Clocks, WorkerClock
from forebay.runtime.shell import FlowShell
from forebay.runtime.turn import Turn
from forebay.runtime.watchdog import Watchdog, signals
from forebay.stages.extract import extract_loop
from forebay.stages.prefetch import prefetch_loop

JOIN_S = 30.0  # a thread that has not ended by then is named and left (it is a daemon)


def run_threads(
    shell: FlowShell,
    *,
    prepare: Callable[[tuple[int, int]], Any],
    computes: Sequence[Callable[[Any], Any]],
    train: Callable[[], None],
    clocks: Clocks,
    watchdog: Watchdog,
    turn: Turn,
    prefetch_threads: int = 1,
    on_start: Callable[[str], None] = lambda role: None,
    say: Callable[[str], None] = print,
) -> list[Any]:
    """Run the stages until `train` returns or something fails; returns the items that were never drawn.

    `computes`: one callable per target worker, host batch -> item. `train` runs on the calling thread and draws from
    the shell. `on_start(role)` is called first in every worker thread (thread counts). Raises the first failure.
    """

    def guarded(role: str, loop: Callable[[], None]) -> Callable[[], None]:
        def body() -> None:
            try:
                on_start(role)
                loop()
            except Stopped:
                pass
            except BaseException as error:  # noqa: BLE001 - the first cause is kept and raised by the main thread
                shell.fail(error)

        return body

    threads: list[threading.Thread] = []

    def spawn(role: str, number: int, loop: Callable[[WorkerClock], None]) -> None:
        name = f"{role} {number}"
        clock = clocks.worker(role, name)
        threads.append(threading.Thread(target=guarded(role, lambda: loop(clock)), name=name, daemon=True))

    for number in range(prefetch_threads):
        spawn("prefetch", number, lambda clock: prefetch_loop(shell, prepare, clock))
    for number, compute in enumerate(computes):
        spawn(
            "target",
            number,
            lambda clock, number=number, compute=compute: extract_loop(number, shell, prepare, compute, turn, clock),
        )
    watchdog.start()
    with signals(watchdog, say):
        for thread in threads:
            thread.start()
        try:
            guarded("drafter", train)()
        finally:
            shell.request_stop()
            deadline = time.monotonic() + JOIN_S
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
            watchdog.end()
    left = [thread.name for thread in threads if thread.is_alive()]
    if left:
        say(f"left running (no answer within {JOIN_S:.0f} s): {', '.join(left)}")
    if shell.cause is not None:
        if isinstance(shell.cause, ForebayError):
            raise shell.cause
        raise RuntimeError(f"the run failed: {shell.cause!r}") from shell.cause
    return shell.items_left()
