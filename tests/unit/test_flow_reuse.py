"""Items that are used several times: each use exactly once, spread over windows, room freed after the last."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import ContractError
from forebay.flow.admission import check_budget
from forebay.flow.coordinator import Coordinator, FlowSettings, Lease, Wait, Window
from forebay.flow.plan import EpochPlan
from forebay.flow.queues import simulate_draws
from forebay.flow.simulate import Load, Outcome, plan_of_jobs, simulate
from forebay.flow.uses import Uses, windows_of

BASE = FlowSettings(budget_bytes=12, window=2, min_fill=3, reuse=2)


def plan(jobs: int, epoch: int = 0, **changes: Any) -> EpochPlan:
    made = {"draw": "live", "window": 2, "min_fill": 3, "reuse": 2, **changes}
    return plan_of_jobs([j % 2 for j in range(jobs)], epoch, **made)


def flow_of(*plans: EpochPlan, **changes: Any) -> Coordinator:
    flow = Coordinator(replace(BASE, **changes))
    for epoch in plans:
        flow.add_epoch(epoch)
    flow.no_more_epochs()
    return flow


def lease_all(flow: Coordinator) -> None:
    while isinstance(got := flow.try_lease(0, 0.0), Lease):
        assert flow.put(got)


def step(flow: Coordinator) -> Window:
    """Lease what there is room for, draw, train, commit."""
    lease_all(flow)
    window = flow.try_draw(0.0)
    assert isinstance(window, Window), window
    for job in window.jobs:
        flow.release(window.epoch, job)
    assert flow.commit(window)
    return window


def finish(flow: Coordinator) -> list[Window]:
    windows = []
    while not flow.closed:
        windows.append(step(flow))
    return windows


def uses_of(windows: list[Window]) -> Counter[tuple[int, int, int]]:
    """(epoch, job, use) of every draw."""
    return Counter((w.epoch, job, use) for w in windows for job, use in w.uses.items())


def every_use(jobs: int, reuse: int, epoch: int = 0) -> dict[tuple[int, int, int], int]:
    return {(epoch, job, use): 1 for job in range(jobs) for use in range(reuse)}


def run(jobs: int, reuse: int, window: int, min_fill: int, draw: str = "live", seed: int = 0, **load: Any) -> Outcome:
    made = plan(jobs, reuse=reuse, window=window, min_fill=min_fill, draw=draw)
    room = max(min_fill, window) + 1 + reuse * window
    settings = FlowSettings(room, window, min_fill, targets=3, draw=draw, reuse=reuse, seed=seed, lease_s=50.0)
    rng = random.Random(seed)
    work = Load(produce=lambda job, worker: rng.uniform(0.5, 2.0), consume=lambda job, replica: 0.1, **load)
    return simulate(settings, [made], work)


def test_the_least_number_of_windows_is_reached_by_taking_the_items_with_most_uses_left() -> None:
    """McNaughton's bound, max(most left, ceil(sum / window)), against draws of it, for random uses left."""
    rng = random.Random(1)
    for _ in range(300):
        window, uses = rng.randint(1, 5), Uses(rng.randint(1, 12), 4)
        for job in range(len(uses.used)):
            uses.take(job, rng.randint(0, 3))
        expected = uses.windows(window)
        for left in range(expected, 0, -1):
            assert uses.windows(window) == left
            jobs = sorted((j for j in range(len(uses.used)) if uses.left(j)), key=uses.left, reverse=True)[:window]
            for job in jobs:
                uses.take(job)
        assert uses.open == uses.windows(window) == 0
    assert [windows_of(n, k, w) for n, k, w in ((16, 1, 8), (17, 1, 8), (16, 2, 8), (3, 2, 8), (9, 3, 8))] == [
        *(2, 3, 4, 2, 4)
    ]


@pytest.mark.parametrize("draw", ["live", "planned"])
@pytest.mark.parametrize(("jobs", "reuse", "window", "min_fill"), [(61, 2, 8, 16), (40, 4, 4, 12), (5, 3, 8, 10)])
def test_every_use_is_drawn_once_in_as_few_windows_as_there_can_be(
    draw: str, jobs: int, reuse: int, window: int, min_fill: int
) -> None:
    """G1, G4 and the schedule's total: no job twice in a window, none short but the last, uses in their order."""
    for seed in range(5):
        outcome = run(jobs, reuse, window, min_fill, draw, seed)
        assert uses_of(outcome.windows) == every_use(jobs, reuse)
        assert len(outcome.windows) == windows_of(jobs, reuse, window)
        sizes = [len(w.jobs) for w in outcome.windows]
        if jobs >= window:
            assert set(sizes[:-1]) == {window}
        assert all(len(set(w.jobs)) == len(w.jobs) for w in outcome.windows)
        assert Counter(outcome.committed) == {(0, job): reuse for job in range(jobs)}


@pytest.mark.parametrize("draw", ["live", "planned"])
def test_two_windows_of_items_keep_the_uses_of_one_apart(draw: str) -> None:
    """Until the drain no item is in two windows in a row; the mean gap is the occupancy in draws."""
    for seed in range(3):
        outcome = run(120, 3, 4, 16, draw, seed)
        windows = outcome.windows[: -2 * 3]
        for one, next_one in pairwise(windows):
            assert not set(one.jobs) & set(next_one.jobs)
        report = outcome.stats["mixing"][0]
        assert report["use_gap_p50"] >= 3
        assert report["items"] == 360
    close = run(120, 3, 4, 4, draw)
    assert close.stats["mixing"][0]["use_gap_min"] == 1, "one window of items cannot keep them apart"


def test_an_items_room_is_freed_after_its_last_use_and_not_before() -> None:
    """G2."""
    flow = flow_of(plan(3), budget_bytes=4)
    lease_all(flow)
    assert flow.admission.charged == 3
    window = flow.try_draw(0.0)
    assert isinstance(window, Window)
    assert [flow.release(0, job) for job in window.jobs] == [False, False]
    assert flow.counters["second_releases"] == 0
    assert flow.commit(window)
    assert (flow.admission.charged, flow.stats(0.0)["occupancy"]) == (3, 3)
    windows = [step(flow), step(flow)]
    assert [w.left for w in (window, *windows)] == [3, 2, 1]
    assert flow.closed
    assert flow.admission.charged == 0
    assert uses_of([window, *windows]) == every_use(3, 2)


def test_at_capacity_the_lease_waits_for_a_last_use() -> None:
    """F11."""
    flow = flow_of(plan(20), budget_bytes=4, min_fill=2)
    lease_all(flow)
    assert flow.try_lease(0, 0.0) == Wait("producer_wait_room")
    while flow.admission.charged == 4:
        window = flow.try_draw(0.0)
        assert isinstance(window, Window)
        flow.commit(window)
        assert bool(window.last) == isinstance(flow.try_lease(0, 0.0), Lease)


@pytest.mark.parametrize("draw", ["live", "planned"])
def test_killed_at_any_event_each_use_is_committed_once(draw: str) -> None:
    """F04 to F09: the survivors' uses and those after a resume are together each use once, in their order."""
    for kill_at in range(60):
        flow, rng = flow_of(plan(7, draw=draw), draw=draw), random.Random(kill_at)
        saved, done, held = flow.snapshot(), [], []
        kept: list[Window] = []
        for _ in range(kill_at):
            if flow.in_flight is not None:
                done.append(flow.in_flight)
                flow.commit(flow.in_flight)
                if rng.random() < 0.5:
                    saved, kept = json.loads(json.dumps(flow.snapshot())), list(done)
            elif held and rng.random() < 0.5:
                flow.put(held.pop(rng.randrange(len(held))))
            elif isinstance(got := flow.try_lease(0, 0.0), Lease):
                held.append(got)
            else:
                flow.try_draw(0.0)
        again = Coordinator.resume(flow.settings, saved, lambda e: plan(7, e, draw=draw))
        again.no_more_epochs()
        assert again.admission.charged == 0
        after = finish(again)
        assert uses_of([*kept, *after]) == every_use(7, 2), f"killed at event {kill_at}"
        if draw == "planned":
            straight = finish(flow_of(plan(7, draw=draw), draw=draw))
            assert [w.uses for w in [*kept, *after]] == [w.uses for w in straight], "G7"


def test_a_checkpoint_from_before_reuse_is_read_as_one_use() -> None:
    flow = flow_of(plan(8, reuse=1), reuse=1)
    first = step(flow)
    saved = flow.snapshot()
    del saved["epochs"][0]["reuse"]
    again = Coordinator.resume(flow.settings, saved, lambda e: plan(8, e, reuse=1))
    again.no_more_epochs()
    assert sorted(job for w in [first, *finish(again)] for job in w.jobs) == list(range(8))


def test_another_reuse_on_resume_is_refused_with_both_numbers(tmp_path: Path) -> None:
    """By the ledger, by the plan's file, and where a plan of another reuse is handed in."""
    saved = flow_of(plan(8)).snapshot()
    with pytest.raises(ContractError, match=r"counts 2 uses of each job \(buffer.reuse\), this run 3"):
        Coordinator.resume(replace(BASE, reuse=3), saved, lambda e: plan(8, e, reuse=3))
    with pytest.raises(ContractError, match=r"made for 2 uses of each item, this run has buffer.reuse 1"):
        flow_of(plan(8), reuse=1)
    plan(8).save(tmp_path / "a.plan")
    with pytest.raises(ContractError, match="reuse: 3 here, 2 there"):
        EpochPlan.load(tmp_path / "a.plan", expect=plan(8, reuse=3).params)


@pytest.mark.parametrize("draw", ["live", "planned"])
def test_a_skipped_step_leaves_the_uses_before_it_committed(draw: str) -> None:
    """F30: the jobs of the window are computed again, for the uses that they have left."""
    flow = flow_of(plan(6, draw=draw), draw=draw)
    windows = [step(flow)]
    while not any(windows[-1].uses.values()):
        lease_all(flow)
        window = flow.try_draw(0.0)
        assert isinstance(window, Window)
        if any(window.uses.values()):
            break
        flow.commit(window)
        windows.append(window)
    for job in window.jobs:
        flow.release(0, job)
    assert flow.skip(window, "not finite")
    ledger = flow.epochs[0].ledger
    assert [ledger.uses.used[job] for job in window.jobs] == list(window.uses.values())
    assert not set(window.jobs) & {key[1] for key in flow.admission.rooms}, "their room is free, last use or not"
    assert uses_of([*windows, *finish(flow)]) == every_use(6, 2)


@pytest.mark.parametrize("draw", ["live", "planned"])
def test_the_last_step_is_skipped_while_the_next_epoch_fills_the_room_of_used_items(draw: str) -> None:
    """F32, F25 with two uses."""
    flow = flow_of(plan(2, 0, draw=draw), plan(9, 1, draw=draw), draw=draw, budget_bytes=4)
    windows = [step(flow)]
    lease_all(flow)
    last = flow.try_draw(0.0)
    assert isinstance(last, Window) and last.epoch == 0 and last.last == {0, 1}
    for job in last.jobs:
        assert flow.release(0, job)
    lease_all(flow)
    flow.skip(last, "not finite")
    windows += finish(flow)
    assert uses_of(windows) == every_use(2, 2) | every_use(9, 2, 1)


@pytest.mark.parametrize("draw", ["live", "planned"])
def test_failures_silence_and_skipped_steps_lose_no_use(draw: str) -> None:
    """G1, F13, F24, F30 on the virtual clock."""
    outcome = run(
        60,
        2,
        4,
        8,
        draw,
        fails=lambda job, attempt: job % 7 == 3 and attempt == 0,
        silent=lambda job, attempt: job == 20 and attempt == 0,
        skips=lambda number: number in (5, 11),
    )
    assert Counter(outcome.committed) == {(0, job): 2 for job in range(60)}
    assert outcome.stats["skipped_steps"] == 2
    assert outcome.stats["peak_bytes"] <= outcome.stats["budget_bytes"]


def test_a_job_is_quarantined_with_the_uses_that_it_had() -> None:
    """The others' uses are all drawn, and no window waits for the one that will not come."""
    for draw in ("live", "planned"):
        flow = flow_of(plan(5, draw=draw), draw=draw, max_attempts=1, on_poison="continue")
        windows = [step(flow)]
        lease_all(flow)
        window = flow.try_draw(0.0)
        assert isinstance(window, Window)
        flow.skip(window, "not finite")
        lost = set(window.jobs)
        windows += finish(flow)
        done = uses_of(windows)
        assert set(flow.quarantined[0]) == lost
        assert all(
            done[0, job, use] == (job not in lost or use < window.uses[job]) for job in range(5) for use in (0, 1)
        )


def test_a_planned_order_is_the_same_for_any_number_and_speed_of_targets() -> None:
    """G7."""
    made = plan(60, draw="planned", window=4, min_fill=8, reuse=3)
    orders = []
    for targets in (1, 2, 6):
        rng = random.Random(targets)
        settings = FlowSettings(20, 4, 8, targets=targets, draw="planned", reuse=3)
        load = Load(produce=lambda job, worker, rng=rng: rng.uniform(0.5, 4.0), consume=lambda job, replica: 1.0)
        orders.append([w.uses for w in simulate(settings, [made], load).windows])
    assert orders[0] == orders[1] == orders[2]


def test_a_planned_order_never_needs_more_than_its_buffer_and_fills_short_windows_up() -> None:
    """So that every window's jobs have their room at (max(min fill, window) + 1) items."""
    for jobs, window, min_fill, reuse in ((50, 4, 6, 2), (47, 4, 4, 3), (9, 8, 8, 4), (30, 1, 1, 3)):
        order = simulate_draws(jobs, window, min_fill, 0, 0, reuse=reuse)
        assert Counter(order[order >= 0].tolist()) == dict.fromkeys(range(jobs), reuse)
        left, room = dict.fromkeys(range(jobs), reuse), max(min_fill, window)
        for first in range(0, len(order), window):
            drawn = [job for job in order[first : first + window].tolist() if job >= 0]
            assert len(set(drawn)) == len(drawn) > 0
            assert set(drawn) <= set([job for job in left if left[job]][:room])
            for job in drawn:
                left[job] -= 1
        settings = FlowSettings(room + 1, window, min_fill, draw="planned", reuse=reuse)
        made = plan(jobs, draw="planned", window=window, min_fill=min_fill, reuse=reuse)
        outcome = simulate(settings, [made], Load(lambda job, worker: 1.0, lambda job, replica: 0.1))
        assert len(outcome.windows) == made.windows
        assert [j for w in outcome.windows for j in w.jobs] == made.draw_order[made.draw_order >= 0].tolist()


def test_mixing_counts_the_copies() -> None:
    """G5: every use of an item is one of its windows' items; short windows are left out of the plan's own r."""
    outcome = run(64, 2, 8, 16)
    report = outcome.stats["mixing"][0]
    assert (report["items"], report["windows"]) == (128, 16)
    made = plan(9, draw="planned", window=8, min_fill=8, reuse=4)
    assert (made.draw_order < 0).any()
    assert Counter(made.drawn_order().tolist()) == dict.fromkeys(range(8), 4), "the ninth job came in short windows"
    assert made.describe()["reuse"] == 4


def test_a_buffer_that_cannot_keep_uses_apart_is_warned_about() -> None:
    assert check_budget(100, 1, 16, 8, 1, 1000, reuse=2) == []
    (close,) = check_budget(100, 1, 10, 8, 1, 1000, reuse=2)
    assert "min_fill 10 is below two windows of 8: raise buffer.min_fill to 16" in close
    assert any(
        "holds 26 items, below buffer.reuse 4 x window 8" in w for w in check_budget(26, 1, 16, 8, 1, 99, None, 4)
    )
