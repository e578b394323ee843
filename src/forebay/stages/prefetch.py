"""Prefetch: the next job in plan order -> its host batch.

Guarantees: an error in preparing a job is handed to the worker that leases the job, so that it counts as that job's
failed attempt and no thread dies alone. Called by `runtime.threads`, one loop per prefetch thread.
"""

from __future__ import annotations

from forebay.observe.clock import WorkerClock
from forebay.stages.flow import PrefetchFlow, Prepare


def prefetch_loop(flow: PrefetchFlow, prepare: Prepare, clock: WorkerClock) -> None:
    """Until the input ends: take the next wanted job, prepare its host batch, hand it over."""
    while (key := flow.next_to_prepare(clock)) is not None:
        with clock.busy():
            try:
                batch = prepare(key)
            except Exception as error:  # noqa: BLE001 - it is raised again where the job is leased
                batch = error
        flow.prepared(key, batch)
