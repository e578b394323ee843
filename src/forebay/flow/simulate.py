"""The same coordinator on a virtual clock: any number of targets and drafters, service times, failures, in milliseconds.

Guarantees: defines no queue, ledger or admission of its own; what is simulated is what runs. A simulation is a function
of its arguments. Called by `forebay bench flow` and by tests.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from forebay.flow.coordinator import Coordinator, FlowSettings, Lease, Wait, Window
from forebay.flow.plan import EpochPlan, PlanParams
from forebay.flow.queues import simulate_draws


def plan_of_jobs(
    buckets: Sequence[int],
    epoch: int = 0,
    nbytes: Sequence[int] | int = 1,
    real: Sequence[int] | None = None,
    draw: str = "live",
    window: int = 8,
    min_fill: int = 10,
    seed: int = 0,
) -> EpochPlan:
    """A plan of jobs of one row each, given by their buckets: for simulations and tests."""
    n = len(buckets)
    kinds = max(buckets, default=0) + 1
    tokens = np.asarray(real if real is not None else [1] * n, dtype=np.int32)
    params = PlanParams(
        token_budget=int(tokens.max(initial=1)),
        anchors_per_item=1,
        slots_per_item=1,
        scored_slots=1,
        bucket_edges=tuple(range(1, kinds + 1)),
        draw=draw,
        window=window,
        min_fill=min_fill,
        item_bytes=1,
        seed=seed,
    )
    arrays: dict[str, Any] = {
        "rows": np.arange(n, dtype=np.int32),
        "lengths": tokens,
        "starts": np.ones(n, dtype=np.bool_),
        "offsets": np.arange(n + 1, dtype=np.int64),
        "buckets": np.asarray(buckets, dtype=np.uint8),
        "real": tokens,
        "padded": tokens,
        "anchors": np.ones(n, dtype=np.int32),
        "nbytes": np.asarray(np.broadcast_to(np.asarray(nbytes), (n,)), dtype=np.int64),
    }
    if draw == "planned":
        arrays["draw_order"] = simulate_draws(n, window, min_fill, seed, epoch)
    return EpochPlan(params, epoch, arrays)


@dataclass(frozen=True)
class Load:
    """How long things take. `produce(job, worker)` and `consume(job, replica)` are seconds; `step_s` a step's own part.

    `fails(job, attempt)`: the attempt ends with an error; `hangs(job, attempt)`: seconds of silence instead of an answer
    (0: none); `skips(draw number)`: the step is not taken.
    """

    produce: Callable[[int, int], float]
    consume: Callable[[int, int], float]
    step_s: float = 0.0
    fails: Callable[[int, int], bool] = lambda job, attempt: False
    hangs: Callable[[int, int], float] = lambda job, attempt: 0.0
    skips: Callable[[int], bool] = lambda number: False


@dataclass
class Outcome:
    """What a simulated run did. Shares and rates are measured from the first draw to the end of input."""

    order: list[tuple[int, int]] = field(default_factory=list)
    committed: list[tuple[int, int]] = field(default_factory=list)
    seconds: float = 0.0
    first_draw_s: float = 0.0
    end_of_input_s: float = 0.0
    consumed_in_span: int = 0
    produced_in_span: int = 0
    busy_targets_s: float = 0.0
    busy_drafters_s: float = 0.0
    sum_residence: int = 0
    sum_occupancy: int = 0
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def span_s(self) -> float:
        return max(self.end_of_input_s - self.first_draw_s, 1e-12)
