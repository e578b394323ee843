"""The coordinator as a whole, one worked example per guarantee and per F case."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from forebay.errors import ConfigError, ContractError, PoisonError
from forebay.flow.coordinator import Coordinator, FlowFailed, FlowSettings, Lease, Wait, Window
from forebay.flow.plan import EpochPlan
from forebay.flow.settings import deal
from forebay.flow.simulate import plan_of_jobs

BASE = FlowSettings(budget_bytes=12, window=2, min_fill=3)


def flow_of(jobs: int | EpochPlan = 8, *more: EpochPlan, end: bool = True, **changes: Any) -> Coordinator:
    settings = replace(BASE, **changes)
    first = jobs if isinstance(jobs, EpochPlan) else plan(jobs, draw=settings.draw)
    flow = Coordinator(settings)
    for epoch in (first, *more):
        flow.add_epoch(epoch)
    if end:
        flow.no_more_epochs()
    return flow


def plan(jobs: int, epoch: int = 0, draw: str = "live", nbytes: list[int] | int = 1) -> EpochPlan:
    return plan_of_jobs([j % 2 for j in range(jobs)], epoch, nbytes, draw=draw, window=2, min_fill=3)


def lease(flow: Coordinator, worker: int = 0, now: float = 0.0) -> Lease:
    got = flow.try_lease(worker, now)
    assert isinstance(got, Lease), got
    return got


def draw(flow: Coordinator, now: float = 0.0) -> Window:
    got = flow.try_draw(now)
    assert isinstance(got, Window), got
    return got


def fill(flow: Coordinator, n: int) -> None:
    for _ in range(n):
        assert flow.put(lease(flow))


def train(flow: Coordinator) -> tuple[int, ...]:
    window = draw(flow)
    for job in window.jobs:
        assert flow.release(window.epoch, job)
    assert flow.commit(window)
    return window.jobs


def finish(flow: Coordinator) -> list[int]:
    """One worker and the training loop, to the end; returns the jobs committed."""
    done: list[int] = []
    while True:
        got = flow.try_lease(0, 0.0)
        if isinstance(got, Lease):
            flow.put(got)
            continue
        window = flow.try_draw(0.0)
        if window is None:
            return done
        assert isinstance(window, Window), window
        flow.commit(window)
        done += window.jobs


def test_at_capacity_the_lease_waits_and_put_never_does() -> None:
    """F11, F16, G2: put answers at once, True or False; the lease names what it waits for."""
    flow = flow_of(20, budget_bytes=4)
    leases = [lease(flow, worker) for worker in range(4)]
    assert flow.try_lease(4, 1.0) == Wait("producer_wait_room")
    assert all(flow.put(x) for x in leases)
    assert flow.try_lease(4, 3.0) == Wait("producer_wait_room")
    window = draw(flow)
    assert flow.try_lease(4, 4.0) == Wait("producer_wait_room"), "a drawn item still holds its room"
    flow.release(0, window.jobs[0])
    assert lease(flow, 4, 5.0).job == 4
    assert flow.stats(9.0)["blocked_s"]["producer_wait_room"] == 4.0
    assert flow.admission.peak == 4


def test_items_of_different_sizes_take_their_own_room() -> None:
    flow = flow_of(plan(4, nbytes=[3, 2, 1, 3]), budget_bytes=12)
    first = lease(flow)
    assert flow.admission.charged == 3
    lease(flow)
    assert flow.admission.charged == 5
    flow.put(first)
    assert flow.admission.charged == 5


def test_impossible_settings_are_refused_when_they_are_made() -> None:
    """F19, G3; unknown policies; planned draws without what they need."""
    with pytest.raises(ConfigError, match=r"\(min_fill 3 \+ 1\).* = 4 B exceeds buffer.bytes 3 B"):
        flow_of(8, budget_bytes=3)
    with pytest.raises(ConfigError, match="queue 'fifo' is unknown: choose one of buffered"):
        replace(BASE, queue="fifo")
    with pytest.raises(ConfigError, match="draw: planned needs dispatch: shared"):
        replace(BASE, draw="planned", dispatch="per_target")
    with pytest.raises(ConfigError, match="planned needs a plan that was made with draw: planned"):
        flow_of(plan(8), draw="planned")


def test_a_min_fill_above_the_jobs_is_warned_about_and_drains() -> None:
    """F02: N = 3, M = 10."""
    flow = flow_of(3, min_fill=10)
    assert any("min_fill 10 is above the 3 jobs" in line for line in flow.warnings)
    assert sorted(finish(flow)) == [0, 1, 2]


def test_the_last_items_drain_below_min_fill_after_end_of_input() -> None:
    """F01, F03, F14, G4; the states on the way."""
    flow = flow_of(5)
    assert flow.state == "FILLING"
    fill(flow, 3)
    assert flow.state == "STEADY"
    train(flow)
    assert flow.try_draw(0.0) == Wait("consumer_wait_fill")
    fill(flow, 1)
    last = lease(flow)
    assert flow.try_draw(0.0) == Wait("consumer_wait_end")
    flow.put(last)
    assert flow.state == "DRAINING"
    assert len(train(flow)) == 2
    assert len(train(flow)) == 1
    assert flow.state == "CLOSED"


def test_after_the_close_nothing_is_drawn_or_leased_and_it_is_counted() -> None:
    flow = flow_of(2)
    finish(flow)
    assert flow.try_draw(0.0) is None
    assert flow.try_draw(0.0) is None
    assert flow.try_lease(0, 0.0) is None
    assert flow.counters["draws_after_close"] == 3


def test_a_second_commit_and_a_second_release_are_refused_and_counted() -> None:
    flow = flow_of(4)
    fill(flow, 4)
    window = draw(flow)
    assert flow.release(0, window.jobs[0])
    assert not flow.release(0, window.jobs[0])
    assert flow.commit(window)
    assert not flow.commit(window)
    assert not flow.skip(window, "late")
    assert not flow.release(0, window.jobs[1])
    assert flow.counters["second_commits"] == 2
    assert flow.counters["second_releases"] == 2
    assert flow.stats(0.0)["jobs"]["committed"] == 2


def test_a_failed_job_keeps_its_room_and_goes_first_then_is_quarantined_by_name() -> None:
    """F13, F28: others fill the room meanwhile, and the retry still finds its own."""
    flow = flow_of(20, budget_bytes=4, on_poison="continue")
    bad = lease(flow)
    fill(flow, 3)
    assert flow.lease_failed(bad, "cosmic ray") == "requeued"
    assert flow.try_draw(0.0) != Wait("consumer_wait_fill")
    assert flow.admission.charged == 4
    for attempt in (1, 2):
        again = lease(flow)
        assert (again.job, again.attempt) == (0, attempt)
        outcome = flow.lease_failed(again, "cosmic ray")
    assert outcome == "quarantined"
    assert flow.quarantined == {0: {0: "cosmic ray"}}
    assert flow.admission.charged == 3, "a quarantined job's room is free"


def test_poison_stops_the_run_with_the_job_and_its_cause() -> None:
    """F13 with on_poison: stop; G10."""
    flow = flow_of(4, max_attempts=1)
    flow.lease_failed(lease(flow), "cosmic ray")
    with pytest.raises(FlowFailed, match="job 0 of epoch 0 failed 1 times, the last time with: cosmic ray") as caught:
        flow.try_lease(0, 0.0)
    assert isinstance(caught.value.__cause__, PoisonError)
    assert flow.state == "FAILED"


def test_the_first_cause_wins_and_reaches_everyone() -> None:
    """G10."""
    flow = flow_of(4)
    held = lease(flow)
    flow.fail(ValueError("first"))
    flow.fail(KeyError("second"))
    for call in (
        lambda: flow.try_lease(0, 0.0),
        lambda: flow.try_draw(0.0),
        lambda: flow.put(held),
        lambda: flow.lease_failed(held, "x"),
    ):
        with pytest.raises(FlowFailed, match="first") as caught:
            call()
        assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("draws", ["live", "planned"])
def test_a_late_put_is_refused_and_its_room_comes_back(draws: str) -> None:
    """F24, F10: the hung attempt's room stays charged until it answers; the retry takes the spare one."""
    flow = flow_of(6, draw=draws)
    late = lease(flow, worker=1, now=0.0)
    assert flow.expire(599.0) == []
    assert flow.renew(late, 500.0) is not None
    assert flow.expire(1099.0) == []
    assert flow.expire(1100.0) == [flow.renew(late, 0.0) or replace(late, expires=1100.0)]
    assert flow.admission.charged == 1
    assert flow.renew(late, 1100.0) is None
    assert not flow.put(late)
    assert flow.counters["stale_puts"] == 1
    assert flow.admission.charged == 0
    assert flow.lease_failed(late, "too late to fail") == "stale"
    assert sorted(finish(flow)) == list(range(6))


def test_two_attempts_that_hang_at_once_stop_the_run_by_name() -> None:
    """F31."""
    flow = flow_of(20)
    lease(flow, worker=0)
    lease(flow, worker=1)
    flow.expire(1000.0)
    with pytest.raises(FlowFailed, match=r"job 0 of epoch 0 on worker 0, job 1 of epoch 0 on worker 1"):
        flow.try_draw(1000.0)


def test_the_spare_item_lets_one_hung_job_be_done_again_at_the_smallest_budget() -> None:
    """G3: (max(min fill, window) + 1) items, one of them hung for ever; every job is still trained."""
    for draws in ("live", "planned"):
        flow = flow_of(9, budget_bytes=4, draw=draws)
        lease(flow, worker=5)
        flow.expire(1000.0)
        assert sorted(finish(flow)) == list(range(9))


@pytest.mark.parametrize("draws", ["live", "planned"])
def test_the_jobs_of_a_skipped_step_are_done_again_and_quarantined_at_the_limit(draws: str) -> None:
    """F30."""
    flow = flow_of(6, draw=draws, max_attempts=2, on_poison="continue")
    fill(flow, 6)
    window = draw(flow)
    flow.release(0, window.jobs[0])
    assert flow.skip(window, "loss is not finite")
    ledger = flow.epochs[0].ledger
    assert [ledger.attempt[j] for j in window.jobs] == [1, 1]
    assert ledger.counts[0] == 2
    assert flow.admission.charged == 4, "the room of skipped jobs is free"
    again = set(window.jobs)
    done: set[int] = set()
    while not flow.closed:
        while isinstance(got := flow.try_lease(0, 0.0), Lease):
            flow.put(got)
        window = draw(flow)
        if again.intersection(window.jobs):
            flow.skip(window, "still not")
        else:
            flow.commit(window)
            done.update(window.jobs)
    assert set(flow.quarantined[0]) >= again
    assert set(flow.quarantined[0]) | done == set(range(6))


@pytest.mark.parametrize("draws", ["live", "planned"])
def test_the_last_step_is_skipped_while_the_next_epoch_fills_the_room(draws: str) -> None:
    """F32, F25: draws pass to the next epoch, counted; room frees; both epochs end complete, no deadlock."""
    flow = flow_of(plan(2, 0, draws), plan(9, 1, draws), draw=draws, budget_bytes=4)
    fill(flow, 4)
    window = draw(flow)
    assert window.epoch == 0
    for job in window.jobs:
        flow.release(0, job)
    fill(flow, 2)
    flow.skip(window, "not finite")
    assert flow.try_lease(0, 0.0) == Wait("producer_wait_room")
    passed = draw(flow)
    assert passed.epoch == 1
    assert flow.counters["epoch_passes"] == 1
    flow.commit(passed)
    assert lease(flow).epoch == 0, "the returned jobs go first"
    flow.lease_failed(flow.epochs[0].ledger.leases[0], "once more")
    assert len(finish(flow)) == 2 + 7
    assert flow.stats(0.0)["jobs"]["committed"] == 11


def test_windows_never_span_epochs_and_the_next_one_is_leased_while_this_drains() -> None:
    """DESIGN section 5; the schedule's total is the sum of ceil(jobs / window)."""
    flow = flow_of(plan(3), plan(3, 1), budget_bytes=12)
    fill(flow, 6)
    windows = []
    while not flow.closed:
        window = draw(flow)
        windows.append((window.step, window.epoch, window.number, len(window.jobs)))
        flow.commit(window)
    assert windows == [(0, 0, 0, 2), (1, 0, 1, 1), (2, 1, 0, 2), (3, 1, 1, 1)]


def test_workers_wait_for_a_plan_and_go_home_when_there_is_none() -> None:
    flow = flow_of(2, end=False)
    fill(flow, 2)
    assert flow.try_lease(0, 0.0) == Wait("producer_wait_work")
    train(flow)
    assert flow.try_draw(0.0) == Wait("consumer_wait_plan")
    assert flow.try_lease(0, 1.0) == Wait("producer_wait_work")
    news = flow.news_for_producers
    flow.add_epoch(plan(2, 1))
    assert flow.news_for_producers > news
    flow.no_more_epochs()
    assert sorted(finish(flow)) == [0, 1]
    assert flow.try_lease(0, 2.0) is None


def test_a_stop_leases_and_draws_nothing_more_but_the_window_in_hand_commits() -> None:
    flow = flow_of(8)
    fill(flow, 4)
    window = draw(flow)
    flow.finish()
    assert flow.try_lease(0, 0.0) is None
    assert flow.commit(window)
    assert flow.try_draw(0.0) is None
    assert flow.snapshot()["step"] == 1


@pytest.mark.parametrize("draws", ["live", "planned"])
def test_killed_at_any_event_the_union_of_committed_jobs_is_everything_once(draws: str) -> None:
    """F04, F05, F06, F08, F09: after each event, resume from the last step boundary; every 4th job is slow."""
    total = events_of(flow_of(8, draw=draws), None)
    for kill_at in range(total):
        flow = flow_of(8, draw=draws)
        saved: list[dict[str, Any]] = [flow.snapshot()]
        events_of(flow, kill_at, saved)
        flow = resume(flow, saved[-1])
        assert flow.admission.charged == 0
        before = committed(saved[-1])
        if flow.epochs:
            fill(flow, 1)  # a start that comes to nothing: killed again before any step
        flow = resume(flow, flow.snapshot())
        after = finish(flow)
        assert sorted([*before, *after]) == list(range(8)), f"killed at event {kill_at}"


def committed(saved: dict[str, Any]) -> list[int]:
    flow = resume(flow_of(8, draw="planned"), saved) if saved["epochs"] else None
    if flow is None:
        return list(range(8))
    return [j for j in range(8) if flow.epochs[0].ledger.state[j] == 4]


def resume(flow: Coordinator, saved: dict[str, Any]) -> Coordinator:
    """As a new process would, from what a checkpoint holds as JSON."""
    again = Coordinator.resume(flow.settings, json.loads(json.dumps(saved)), lambda e: plan(8, e, flow.settings.draw))
    again.no_more_epochs()
    return again


def events_of(flow: Coordinator, stop_at: int | None, saved: list[dict[str, Any]] | None = None) -> int:
    """Two workers and the training loop, one event at a time; a snapshot after each commit.

    The worker that holds a 4th job answers only when nothing else can happen. Stops after `stop_at` events.
    """
    held: list[Lease] = []
    events = 0
    while events != stop_at:
        events += 1
        quick = [x for x in held if x.job % 4]
        if flow.in_flight is not None:
            flow.commit(flow.in_flight)
            if saved is not None:
                saved.append(flow.snapshot())
        elif len(held) < 2 and isinstance(got := flow.try_lease(len(held), 0.0), Lease):
            held.append(got)
        elif quick:
            held.remove(quick[0])
            flow.put(quick[0])
        elif not isinstance(flow.try_draw(0.0), Window):
            if not held:
                return events
            flow.put(held.pop(0))
    return events


def test_a_checkpoint_at_the_end_of_an_epoch_neither_repeats_nor_loses_the_next() -> None:
    """F07."""
    flow = flow_of(plan(4), plan(4, 1))
    fill(flow, 4)
    train(flow)
    train(flow)
    saved = flow.snapshot()
    assert [e["epoch"] for e in saved["epochs"]] == [1]
    again = Coordinator.resume(flow.settings, saved, lambda e: plan(4, e))
    again.no_more_epochs()
    assert again.steps == 2
    assert again.next_epoch == 2
    assert sorted(finish(again)) == [0, 1, 2, 3]

    alone = flow_of(4, end=False)
    fill(alone, 4)
    train(alone)
    train(alone)
    assert alone.snapshot()["epochs"] == []
    assert alone.snapshot()["next_epoch"] == 1


def test_a_snapshot_of_another_plan_is_refused() -> None:
    saved = flow_of(8).snapshot()
    with pytest.raises(ContractError, match="epoch 0 with 8 jobs, the plan of epoch 0 with 6"):
        Coordinator.resume(BASE, saved, lambda e: plan(6, e))


def test_attempts_deferrals_and_quarantines_survive_a_resume() -> None:
    flow = flow_of(8, draw="planned", on_poison="continue", max_attempts=2)
    fill(flow, 4)
    window = draw(flow)
    flow.skip(window, "not finite")
    bad = lease(flow)
    flow.lease_failed(bad, "a")
    flow.lease_failed(lease(flow), "b")
    saved = json.loads(json.dumps(flow.snapshot()))
    again = Coordinator.resume(flow.settings, saved, lambda e: plan(8, e, "planned"))
    again.no_more_epochs()
    assert again.quarantined == {0: {bad.job: "b"}}
    assert [again.epochs[0].ledger.attempt[j] for j in window.jobs] == [1, 1]
    done = finish(again)
    assert sorted([*done, bad.job]) == list(range(8))
    assert set(done[-2:]) == set(window.jobs), "jobs that lost their place come last"


def test_per_target_dispatch_deals_in_turn_and_a_full_queue_stops_the_dealing() -> None:
    """The oldest design: a target that is slow starves the others."""
    flow = flow_of(20, budget_bytes=20, targets=2, dispatch="per_target", prefetch_jobs=2)
    assert [lease(flow, 1).job for _ in range(2)] == [1, 3]
    assert flow.try_lease(1, 0.0) == Wait("producer_wait_work"), "job 4 waits for the slow target's queue"
    assert lease(flow, 0).job == 0
    assert lease(flow, 1).job == 5


def test_prefetch_sees_the_next_jobs_in_the_order_of_their_leases() -> None:
    flow = flow_of(plan(3), plan(3, 1), budget_bytes=12)
    first = lease(flow)
    assert flow.upcoming(4) == [(0, 1), (0, 2), (1, 0), (1, 1)]
    lease(flow)
    flow.lease_failed(first, "again")
    assert flow.upcoming(2) == [(0, 0), (0, 2)]


def test_the_draw_of_a_window_is_the_same_for_any_timing_when_planned() -> None:
    """G7: one worker in order, or three that answer in reverse."""
    orders = []
    for group in (1, 3):
        flow = flow_of(12, draw="planned")
        order: list[tuple[int, ...]] = []
        while not flow.closed:
            held = [x for w in range(group) if isinstance(x := flow.try_lease(w, 0.0), Lease)]
            for x in reversed(held):
                flow.put(x)
            while isinstance(window := flow.try_draw(0.0), Window):
                order.append(window.jobs)
                flow.commit(window)
        orders.append(order)
    assert orders[0] == orders[1]


def test_windows_are_dealt_by_token_load() -> None:
    """Mean over max of the replicas' loads at least 0.95 with four items or more each; F17: replicas may be empty."""
    tokens = [1000, 900, 950, 990, 400, 980, 970, 960, 700, 660, 930, 910]
    for replicas in (1, 2, 3):
        parts = deal(range(12), tokens, replicas)
        loads = [sum(tokens[j] for j in part) for part in parts]
        assert sorted(j for part in parts for j in part) == list(range(12))
        assert sum(loads) / replicas / max(loads) >= 0.95
    assert deal([7], [5], 3) == ((7,), (), ())


def test_all_replicas_take_the_same_steps_and_a_short_last_window_is_trained() -> None:
    """F17: N mod (replicas x accumulation) != 0."""
    flow = flow_of(7, drafters=2, window=4, min_fill=4)
    sizes = []
    while not flow.closed:
        while isinstance(got := flow.try_lease(0, 0.0), Lease):
            flow.put(got)
        window = draw(flow)
        sizes.append([len(part) for part in window.parts])
        flow.commit(window)
    assert [sum(s) for s in sizes] == [4, 3]
    assert all(len(s) == 2 for s in sizes)
