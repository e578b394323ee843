"""What every shell around the flow keeps, asked of each in turn: everything is trained once, failures end the run by
name, stops are clean. `pipe` makes a pipeline (tests/shells.py) around the shell in question."""

import functools
import threading
import time

import pytest

from forebay.errors import PoisonError
from forebay.runtime.shell import FlowShell
from shells import Run, plans

SHELLS = {"threads": FlowShell}


@pytest.fixture(params=sorted(SHELLS))
def pipe(request):
    return functools.partial(Run, make=SHELLS[request.param])


def test_every_job_of_every_epoch_is_committed_exactly_once(pipe):
    """G1, with three targets."""
    run = pipe(plans())
    assert run() == []
    assert sorted(run.committed) == run.everything
    assert run.stats["peak_bytes"] <= 2000 and run.stats["charged_bytes"] == 0


def test_a_job_that_fails_twice_is_tried_again_and_committed(pipe):
    """F13."""
    failed = []

    def extract(key):
        if key == (0, 3) and len(failed) < 2:
            failed.append(key)
            raise ValueError("planted")
        return key

    run = pipe(plans(), extract=extract)
    run()
    assert len(failed) == 2 and sorted(run.committed) == run.everything
    assert sum("planted" in line for line in run.shell.failures) == 2


def test_a_job_that_always_fails_stops_the_run_by_name_or_is_quarantined(pipe):
    """F13, G10."""

    def extract(key):
        if key == (0, 3):
            raise ValueError("planted")
        return key

    with pytest.raises(PoisonError, match=r"job 3 of epoch 0 failed 3 times.*planted"):
        pipe(plans(), extract=extract)()
    run = pipe(plans(), extract=extract, on_poison="continue")
    run()
    assert sorted([*run.committed, (0, 3)]) == run.everything
    assert run.stats["jobs_quarantined"] == 1 and "planted -> quarantined" in run.shell.failures[-1]


def test_a_bug_in_any_thread_ends_the_run_with_that_cause(pipe):
    """G10: the first cause is raised, everyone else stops."""

    def after(windows, shell):
        if windows == 2:
            raise ZeroDivisionError("planted in the training loop")

    before = threading.active_count()
    with pytest.raises(RuntimeError, match="planted in the training loop") as error:
        pipe(plans(), after=after)()
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert threading.active_count() == before


def test_a_stop_finishes_the_window_and_leaves_the_rest_for_a_resume(pipe):
    """F04, F06: what is left plus what was committed is everything, each once."""

    def stop(windows, shell):
        if windows == 3:
            shell.request_stop()

    first = pipe(plans(), after=stop)
    first()
    assert len(first.committed) == 3 * 4
    saved = first.shell.snapshot()
    second = pipe(plans(), saved=saved)
    second()
    assert sorted(first.committed + second.committed) == first.everything


def test_a_silent_worker_loses_its_job_and_its_late_answer_is_refused(pipe):
    """F24: leases, with a real hang."""
    answered = threading.Event()
    late = []

    def extract(key):
        if key == (0, 2) and not late:
            late.append(key)
            answered.wait(20)
        return key

    def after(windows, shell):
        if (0, 2) in run.committed:
            answered.set()

    run = pipe(plans(epochs=1), extract=extract, after=after, lease_s=0.05)
    run()
    answered.set()
    assert sorted(run.committed) == run.everything
    assert run.stats["expired"] >= 1 and run.stats["stale_puts"] >= 1


def test_no_thread_is_left_after_many_runs():
    before = threading.active_count()
    start = time.monotonic()
    rounds = 0
    while rounds < 50:
        Run(plans(epochs=1, rows=24), targets=2)()
        rounds += 1
    assert threading.active_count() == before
    assert time.monotonic() > start
