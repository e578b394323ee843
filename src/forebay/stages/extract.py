"""The target worker: lease a job and its room -> host batch -> hidden states -> put.

Guarantees: whatever goes wrong with a job's attempt is reported to the flow under that job's name, and the worker
goes on with the next. Called by `runtime.threads`, one loop per target.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from forebay.errors import Stopped
from forebay.observe.clock import WorkerClock
from forebay.stages.flow import Prepare, TargetFlow
from forebay.stages.item import Item


def extract_loop(
    worker: int,
    flow: TargetFlow,
    prepare: Prepare,
    compute: Callable[[Any], Any],
    turn: Callable[[WorkerClock], contextlib.AbstractContextManager[None]],
    clock: WorkerClock,
) -> None:
    """Until there is no more work: lease, fetch the host batch, compute the item in this role's turn, put it."""
    while (lease := flow.lease(worker, clock)) is not None:
        try:
            batch = flow.batch(lease, clock, prepare)
            with turn(clock), clock.busy():
                item = compute(batch)
        except Stopped:
            raise
        except Exception as error:  # noqa: BLE001 - the flow counts it and decides
            flow.job_failed(lease, error)
        else:
            clock.did(item.batch.job.real_tokens if isinstance(item, Item) else 0)  # a simulated item has no tokens
            flow.put(lease, item)
