"""Hangs, waits, signals and ends in the local runtime, with real threads around fake or toy compute."""

import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from forebay.config import OptimConfig
from forebay.errors import ForebayError, PoisonError, Stopped
from forebay.flow.plan import PlanParams, plan_epoch
from forebay.models.loss import BlockSums
from forebay.observe.clock import WorkerClock
from forebay.runtime import threads
from forebay.runtime.turn import Turn
from forebay.runtime.watchdog import Watchdog
from forebay.stages.item import Item, SlotPool
from forebay.stages.train import DrafterStep, learning_rate, train_loop
from shells import Run, plans


class Pooled(Run):
    """A pipeline whose items are slots of a pool, as in a real run."""

    def __init__(self, given, *, extract=lambda key: key, **settings):
        self.pool = SlotPool(20, 2, 2, None, torch.float32)
        super().__init__(given, **settings)
        inner = extract

        def compute(key):
            slot = self.pool.acquire()
            try:
                inner(key)
            except BaseException:
                self.pool.release(slot)
                raise
            return key, slot

        self.extract = compute
        self.shell.flow.discard = lambda item: self.pool.release(item[1])

    def train(self):
        while (drawn := self.shell.draw(self.clock)) is not None:
            window, parts = drawn
            for part in parts:
                for (epoch, job), slot in part:
                    self.pool.release(slot)
                    self.shell.release(epoch, job)
            self.shell.commit(window)
            self.committed += [(window.epoch, job) for job in window.jobs]
            self.after(len(self.committed), self.shell)

    def __call__(self):
        left = super().__call__()
        for _, slot in left:
            self.pool.release(slot)
        return left


def test_a_hung_attempts_slot_and_room_come_back_with_its_late_answer():
    """F24: the answer is refused and counted, its slot is free again before its room can be leased."""
    go_on, hung, owned = threading.Event(), [], []

    def extract(key):
        if key == (0, 2) and not hung:
            hung.append(key)
            assert go_on.wait(20)

    def after(windows, shell):
        if (0, 2) in run.committed:
            go_on.set()

    run = Pooled(plans(epochs=2), extract=extract, after=after, lease_s=0.5)
    release = run.shell.flow.discard
    run.shell.flow.discard = lambda item: (owned.append(run.shell._changed._is_owned()), release(item))
    assert run() == []
    assert sorted(run.committed) == run.everything
    assert run.coordinator.counters["stale_puts"] == 1 and run.coordinator.hung == []
    assert run.pool.made == run.pool.free and run.coordinator.admission.charged == 0
    assert owned == [True]


def test_a_lease_does_not_expire_while_an_evaluation_has_the_target():
    """C75: who waits for somebody's long but known work is not taken for dead."""
    evaluated, waiting = threading.Event(), threading.Event()

    def extract(key):
        if key == (0, 6):
            waiting.set()
            assert evaluated.wait(20)
        return key

    def after(windows, shell):
        if windows == 1:
            with shell.leases_held():
                assert waiting.wait(20)
                threading.Event().wait(1.0)  # longer than a lease
            evaluated.set()

    run = Run(plans(epochs=1), targets=1, extract=extract, after=after, lease_s=0.4)
    run()
    assert run.coordinator.counters["expired"] == 0 and sorted(run.committed) == run.everything


def test_a_target_that_never_comes_back_ends_the_run_by_name(monkeypatch, tmp_path):
    """G10: the only target hangs for ever while it has the turn, so that no retry and no step can be made."""
    monkeypatch.setattr(threads, "JOIN_S", 0.1)
    release, said = threading.Event(), []

    def extract(key):
        if key == (0, 5):
            release.wait(60)
        return key

    run = Run(plans(epochs=1), targets=1, extract=extract, lease_s=0.1)
    run.watchdog = Watchdog(run.shell, run.clocks, stall_s=0.3, say=said.append, stacks=tmp_path / "stacks.txt")
    turn = Turn(True, run.shell.failed)
    with pytest.raises(ForebayError, match=r"a target never came back \(job 5 of epoch 0 on target 0\)"):
        threads.run_threads(
            run.shell,
            prepare=lambda key: key,
            computes=[run.extract],
            train=run.train,
            clocks=run.clocks,
            watchdog=run.watchdog,
            turn=turn,
            say=said.append,
        )
    release.set()
    assert any("left running" in line and "target 0" in line for line in said)


def test_a_wait_that_is_long_is_named_with_who_waits_for_what():
    said, release = [], threading.Event()

    def say(text):
        said.append(text)
        if "target 0 has been waiting" in text:
            release.set()

    run = Run(plans(epochs=1), targets=1)
    run.watchdog = Watchdog(run.shell, run.clocks, long_wait_s=0.05, say=say)
    threads.run_threads(
        run.shell,
        prepare=lambda key: (release.wait(20), key)[1],
        computes=[run.extract],
        train=run.train,
        clocks=run.clocks,
        watchdog=run.watchdog,
        turn=Turn(shared=False),
    )
    assert any(line.startswith("target 0 has been waiting 0 s for its host batch (prefetch)") for line in said)
    assert sorted(run.committed) == run.everything


def test_a_stall_dumps_all_stacks_once_and_the_run_goes_on(tmp_path):
    said, release = [], threading.Event()

    def the_planted_stall(key):
        if key == (0, 3):
            release.wait(20)
        return key

    def say(text):
        said.append(text)
        if "nothing has moved" in text:
            release.set()

    run = Run(plans(epochs=1), targets=1, extract=the_planted_stall)
    run.watchdog = Watchdog(run.shell, run.clocks, stall_s=0.1, say=say, stacks=tmp_path / "stacks.txt")
    run()
    stacks = (tmp_path / "stacks.txt").read_text()
    assert stacks.startswith("nothing has moved for") and stacks.count("in the_planted_stall") == 1
    assert any("drafter 0 for the buffer to reach its min fill" in line for line in said)
    assert sorted(run.committed) == run.everything


def test_a_watchdog_that_fails_ends_the_run_with_that_cause():
    """G10: without it expired leases and stalls would go unseen."""

    def status():
        raise ZeroDivisionError("planted in the status")

    run = Run(plans(), after=lambda n, shell: shell.failed() or threading.Event().wait(0.01))
    run.watchdog = Watchdog(run.shell, run.clocks, stall_s=0.1, say=lambda text: None, status=status)
    with pytest.raises(RuntimeError, match="planted in the status"):
        run()


def test_who_waits_for_a_turn_leaves_when_the_run_has_failed():
    failed = threading.Event()
    turn, clock = Turn(True, failed.is_set), WorkerClock("target", "target 0")
    with turn(clock):
        failed.set()
        with pytest.raises(Stopped), turn(clock):
            pass
    with turn(clock):
        assert clock.wait_s["turn"] > 0


def test_a_signal_ends_a_run_in_the_written_order():
    """DESIGN 8: lease nothing more, finish the window, commit, checkpoint, join; hand back what was never drawn."""
    run, events, stopped = Pooled(plans()), [], threading.Event()
    flow, train, handler = run.coordinator, run.train, signal.getsignal(signal.SIGTERM)
    lease, commit, stop = flow.try_lease, flow.commit, run.shell.request_stop

    def try_lease(worker, now):
        result = lease(worker, now)
        if hasattr(result, "job"):
            events.append("lease")
        return result

    def commit_window(window):
        if flow.steps == 2:  # in mid-window, and this thread holds the shell's lock: the handler must take none
            os.kill(os.getpid(), signal.SIGTERM)
        events.append("commit")
        return commit(window)

    def request_stop():
        stop()
        events.append("stop")
        stopped.set()

    def train_then_checkpoint():
        train()
        events.append("checkpoint")
        assert run.shell.snapshot()["step"] == flow.steps

    flow.try_lease, flow.commit, run.shell.request_stop = try_lease, commit_window, request_stop
    run.train, run.after = train_then_checkpoint, lambda n, shell: flow.steps == 3 and stopped.wait(20)
    run()
    first = events.index("stop")
    assert events[:first].count("commit") == 3  # the window in hand was finished and committed
    assert events[first:] == ["stop", "checkpoint", "stop"]  # the last one comes before the threads are joined
    assert flow.in_flight is None and len(run.committed) == 12
    assert run.pool.made == run.pool.free
    assert not [t.name for t in threading.enumerate() if t.name.startswith(("target", "prefetch", "watchdog"))]
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_second_signal_stops_at_once():
    """143 = 128 + SIGTERM, though the window in hand would never end; and both signals before the threads start."""
    program = textwrap.dedent(
        """
        import os, signal, sys, threading
        sys.path.insert(0, {tests!r})
        from shells import Run, plans
        from forebay.runtime.watchdog import signals

        def after(windows, shell):
            os.kill(os.getpid(), signal.SIGTERM)
            while not shell.stopping:
                threading.Event().wait(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(60)

        run = Run(plans(), after=after)
        with signals(run.watchdog, print):
            if {early}:
                os.kill(os.getpid(), signal.SIGTERM)
            run()
        """
    )
    for early in (False, True):
        text = program.format(tests=str(Path(__file__).parent.parent), early=early)
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=50)
        assert done.returncode == (0 if early else 143), done.stderr
        assert "a second signal stops at once" in done.stderr


def handles():
    return {
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "shm": os.listdir("/dev/shm"),
    }


def start_and_stop(rounds):
    """Runs that end in every way: complete, stopped, with a poison job, a bug in training, a bug in prefetch."""
    rng = random.Random(0)

    def bug(*given):
        raise ZeroDivisionError

    def poison(key):
        if key == (0, 4):
            raise ValueError

    given = plans(epochs=1, rows=40)
    for number in range(rounds):
        way = ("complete", "stopped", "poison", "bug")[number % 4]
        after = {"stopped": lambda n, shell: n >= 4 and shell.request_stop(), "bug": bug}.get(way, lambda n, shell: 0)
        run = Pooled(given, targets=rng.randint(1, 3), extract=poison if way == "poison" else len, after=after)
        with contextlib.suppress(PoisonError, RuntimeError) if way in ("poison", "bug") else contextlib.nullcontext():
            run()
            assert run.pool.made == run.pool.free
        assert (way == "complete") == (sorted(run.committed) == run.everything)
        assert not [t.name for t in threading.enumerate() if t.name.startswith(("target", "prefetch", "watchdog"))]


def test_no_thread_file_or_shared_memory_is_left_after_many_runs():
    start_and_stop(4)
    gc.collect()
    before = handles()
    start_and_stop(40)
    gc.collect()
    assert handles() == before


@pytest.mark.slow
def test_no_thread_file_or_shared_memory_is_left_after_a_thousand_runs():
    start_and_stop(4)
    gc.collect()
    before = handles()
    start_and_stop(1000)
    gc.collect()
    assert handles() == before


class Toy:
    """A replica with one weight; every item pulls it by the same amount."""

    def __init__(self):
        self.module = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(self.module.weight)

    def micro_step(self, item, scale):
        (self.module.weight.sum() * scale).backward()
        sums = BlockSums.zeros(2)
        sums.loss += 1
        return sums


def toy_item(key):
    job = SimpleNamespace(real_tokens=1, bucket=0, epoch=key[0], id=key[1])
    batch = SimpleNamespace(job=job, weight_sum=1.0, n_slots=1)
    batch.use = lambda number: batch
    return Item(batch, None)


class ToyRun(Run):
    def __init__(self, given, replicas, **settings):
        super().__init__(given, extract=toy_item, drafters=len(replicas), **settings)
        total = sum(plan.windows for plan in given)
        self.step = DrafterStep(replicas, OptimConfig(lr=0.1, warmup_share=0.0, min_lr_share=0.1, clip=100), total)
        self.outcomes = []

    def train(self):
        def release(item):
            self.shell.release(item.batch.job.epoch, item.batch.job.id)

        turn = Turn(shared=False)
        train_loop(self.shell, self.step, turn, self.clock, release, lambda w, o: self.outcomes.append((w, o)))


def ten_jobs(epochs=2, **changes):
    params = PlanParams(16, 4, 4 * 3, 3, (16,), window=4, min_fill=4, item_bytes=100, **changes)
    made = [plan_epoch(np.full(10, 16), np.full(10, 4), params, epoch) for epoch in range(epochs)]
    assert [len(plan) for plan in made] == [10] * epochs
    return made


def test_ten_batches_in_windows_of_four_make_three_steps_an_epoch_and_the_rate_ends_at_its_minimum():
    """C80: 2 epochs => 6 steps, the rate at its minimum on step 6 exactly, and a full-size gradient of the last two."""
    run = ToyRun(ten_jobs(), [Toy()])
    run()
    assert [len(window.jobs) for window, _ in run.outcomes] == [4, 4, 2] * 2
    rates = [outcome.lr for _, outcome in run.outcomes]
    assert rates == [learning_rate(step, 6, run.step.optim) for step in range(6)]
    assert rates[-1] == 0.1 * 0.1 and all(rate > 0.011 for rate in rates[:-1])
    assert [outcome.grad_norm for _, outcome in run.outcomes] == pytest.approx([1.0] * 6)


@pytest.mark.parametrize("settings", [{}, {"reuse": 2}, {"reuse": 3, "budget": 500}], ids=str)
def test_the_rate_ends_at_its_minimum_also_where_a_step_was_skipped_or_windows_were_short(settings):
    """F30, C80: what must come again, or did not fit, makes the schedule as much longer as it must be."""
    toy = Toy()
    run = ToyRun(ten_jobs(1, reuse=settings.get("reuse", 1)), [toy], **settings)
    inner = toy.micro_step

    def micro_step(item, scale):
        return inner(item, float("nan") if len(run.outcomes) == 1 else scale)

    toy.micro_step = micro_step
    run()
    taken = [outcome for _, outcome in run.outcomes if outcome.finite]
    assert len(run.outcomes) == len(taken) + 1
    assert taken[-1].lr == pytest.approx(0.1 * 0.1) and all(outcome.lr > 0.0101 for outcome in taken[:-1])


def test_the_error_of_one_replica_is_the_one_that_is_shown():
    """C74 in threads: replica 1 fails at step 2; the run ends with that error, not with somebody's timeout."""
    good, bad = Toy(), Toy()
    inner = bad.micro_step

    def micro_step(item, scale):
        if run.step.taken == 1:
            raise ValueError("planted in replica 1")
        return inner(item, scale)

    bad.micro_step = micro_step
    run = ToyRun(ten_jobs(), [good, bad])
    with pytest.raises(RuntimeError, match="planted in replica 1") as error:
        run()
    run.step.close()
    assert isinstance(error.value.__cause__, ValueError) and len(run.outcomes) == 1
