"""The flow on a virtual clock, and the benchmark that compares its designs; faults planted in the flow are caught."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

from forebay.bench import flow as bench
from forebay.flow.admission import Admission
from forebay.flow.coordinator import FlowFailed, FlowSettings
from forebay.flow.epoch import Epoch
from forebay.flow.ledger import Ledger
from forebay.flow.queues import BufferedHSQueue
from forebay.flow.simulate import Load, plan_of_jobs, simulate

sys.path.insert(0, str(Path(__file__).parent))
from test_flow_interleavings import World


def settings(targets: int = 3, draw: str = "live", **more: Any) -> FlowSettings:
    return FlowSettings(24, window=4, min_fill=6, targets=targets, drafters=2, draw=draw, lease_s=50.0, **more)


def plans(draw: str = "live", epochs: int = 1, jobs: int = 60) -> list[Any]:
    return [plan_of_jobs([j % 3 for j in range(jobs)], e, draw=draw, window=4, min_fill=6) for e in range(epochs)]


def noisy(seed: int, **more: Any) -> Load:
    rng = random.Random(seed)
    return Load(produce=lambda job, worker: rng.uniform(0.5, 4.0), consume=lambda job, replica: 1.0, **more)


def test_a_planned_order_is_the_same_for_any_number_and_speed_of_targets() -> None:
    """G7: 1, 2 and 6 workers with random delays; live draws differ."""
    orders = {
        draw: [simulate(settings(n, draw), plans(draw), noisy(n)).order for n in (1, 2, 6)]
        for draw in ("planned", "live")
    }
    assert orders["planned"][0] == orders["planned"][1] == orders["planned"][2]
    assert orders["live"][0] != orders["live"][2]


@pytest.mark.parametrize("draw", ["live", "planned"])
def test_failures_silence_and_skipped_steps_lose_nothing(draw: str) -> None:
    """G1, F13, F24, F30 over three epochs that flow into one another."""
    load = noisy(
        1,
        fails=lambda job, attempt: job % 7 == 3 and attempt == 0,
        silent=lambda job, attempt: job == 20 and attempt == 0,
        skips=lambda number: number == 5,
    )
    outcome = simulate(settings(4, draw), plans(draw, epochs=3), load)
    assert sorted(outcome.committed) == [(e, j) for e in range(3) for j in range(60)]
    assert outcome.stats["stale_puts"] == outcome.stats["expired"] == 3
    assert outcome.stats["skipped_steps"] == 3
    assert outcome.stats["peak_bytes"] <= 24


def test_two_silent_workers_stop_the_simulated_run() -> None:
    """F31."""
    load = noisy(1, silent=lambda job, attempt: job in (5, 6))
    with pytest.raises(FlowFailed, match=r"job 5 of epoch 0 .* job 6 of epoch 0"):
        simulate(settings(4), plans(), load)


def test_the_default_design_reaches_the_bound_and_the_older_ones_show_where_they_fail() -> None:
    """The claims of docs/flow.md, on the virtual clock at 6 + 2 devices."""
    fleet = bench.FLEETS[0]
    share = {
        (skew.name, design.dispatch, design.queue): bench.run_virtual(fleet, skew, design)
        for skew in bench.SKEWS
        for design in (bench.DEFAULT, bench.Design(dispatch="per_target"), bench.Design(queue="bucketed"))
    }
    for (_, dispatch, queue), row in share.items():
        assert row["peak_bytes_share"] <= 1
        if (dispatch, queue) == ("shared", "buffered"):
            assert row["share_of_bound"] >= 0.98
            assert row["r"] <= 0.02
    assert share["slow target", "per_target", "buffered"]["share_of_bound"] < 0.5
    assert share["rare bucket", "shared", "bucketed"]["share_of_bound"] < 0.95


def test_the_benchmark_gives_the_keys_that_it_promises() -> None:
    row = bench.run_virtual(bench.FLEETS[0], bench.SKEWS[0], bench.DEFAULT)
    assert set(bench.KEYS) <= set(row)


def worlds_fail(count: int = 400) -> bool:
    for seed in range(count):
        try:
            World(seed).run()
        except (AssertionError, KeyError, IndexError, ValueError):
            return True
    return False


@pytest.mark.parametrize(
    "fault",
    [
        "room is not checked",
        "late answers count",
        "the end is not seen",
        "an item is forgotten",
        "a room is freed late",
        "a used item does not come back",
        "a room is freed before the last use",
    ],
)
def test_the_interleavings_catch_a_planted_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each guard is shown to be one: without it, some of 400 worlds break a guarantee."""
    if fault == "room is not checked":

        def charge(self: Admission, key: object, nbytes: int) -> None:
            self.rooms[key] = nbytes
            self.charged += nbytes

        monkeypatch.setattr(Admission, "fits", lambda self, nbytes: True)
        monkeypatch.setattr(Admission, "charge", charge)
    elif fault == "late answers count":
        monkeypatch.setattr(Ledger, "live", lambda self, lease: lease.job in self.leases)
    elif fault == "the end is not seen":
        monkeypatch.setattr(Ledger, "ended", property(lambda self: False))
    elif fault == "an item is forgotten":
        put = BufferedHSQueue.put
        monkeypatch.setattr(BufferedHSQueue, "put", lambda self, job, bucket: job == 2 or put(self, job, bucket))
    elif fault == "a used item does not come back":
        monkeypatch.setattr(Epoch, "commit", lambda self, job: self.ledger.commit(job))
    elif fault == "a room is freed before the last use":
        commit = Epoch.commit
        monkeypatch.setattr(Epoch, "commit", lambda self, job: commit(self, job) or True)
    else:
        free = Admission.free
        monkeypatch.setattr(Admission, "free", lambda self, key: len(key) == 3 or free(self, key))
    assert worlds_fail()


def test_without_a_fault_the_same_worlds_hold() -> None:
    assert not worlds_fail()
