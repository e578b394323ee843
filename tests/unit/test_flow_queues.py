"""The queues one by one: uniform, golden, complete, and each older relative's own way."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from forebay.flow.ledger import Ledger
from forebay.flow.queues import (
    BucketedHSQueue,
    BufferedHSQueue,
    Drawn,
    HSQueue,
    PerDrafterHSQueue,
    PlannedHSQueue,
    simulate_draws,
)
from forebay.flow.random import CounterRandom

N = 24
GOLDEN = [[5, 8, 9], [4, 3, 7], [0, 2, 1], [6]]
GOLDEN_PLANNED = [1, 0, 5, 2, 6, 7, 9, 8, 3, 4, 10, 11]
CHI2_15 = 56.5  # the 1e-6 quantile's upper end at 15 degrees


def buffered(seed: int = 0, min_fill: int = 4, max_age: int | None = None) -> BufferedHSQueue:
    return BufferedHSQueue(CounterRandom(seed, 0), min_fill, max_age)


QUEUES: dict[str, Callable[[], HSQueue]] = {
    "buffered": buffered,
    "max_age": lambda: buffered(max_age=6),
    "planned": lambda: PlannedHSQueue(simulate_draws(N, 3, 4, 0, 0), 3),
    "bucketed": lambda: BucketedHSQueue(3),
    "per_drafter": lambda: PerDrafterHSQueue(2),
}


@pytest.mark.parametrize("name", QUEUES)
def test_everything_is_drawn_once_and_residence_equals_occupancy(name: str) -> None:
    """F01, F02, F12, F26 under 200 random schedules of arrivals and draws."""
    for seed in range(200):
        rng = random.Random(seed)
        queue = QUEUES[name]()
        arriving = list(range(N))
        rng.shuffle(arriving)
        expected = [N // 3] * 3
        seen: list[int] = []
        t = 0
        while len(seen) < N:
            if arriving and rng.random() < 0.7:
                job = arriving.pop()
                expected[job % 3] -= 1
                queue.put(job, job % 3)
            before = len(queue)
            drawn = queue.draw(3, t, not arriving, False, expected)
            if drawn is not None:
                assert drawn.occupancy == before
                assert len(queue) == before - len(drawn.jobs)
                seen += drawn.jobs
                t += 1
        assert sorted(seen) == list(range(N))
        assert t == N // 3, "only the last window may be short"
        assert queue.residence.sum_residence == queue.residence.sum_occupancy


def test_a_draw_waits_for_the_min_fill_and_drains_below_it_after_the_end() -> None:
    """F01, F02, F03, F12, F14."""
    queue = buffered(min_fill=10)
    for job in range(9):
        queue.put(job, 0)
    assert queue.draw(3, 0, False, False, ()) is None
    queue.put(9, 0)
    drawn = queue.draw(3, 0, False, False, ())
    assert drawn is not None
    assert len(drawn.jobs) == 3
    assert len(queue) == 7
    assert queue.draw(3, 1, False, False, ()) is None
    sizes = [len(d.jobs) for t in range(1, 5) if (d := queue.draw(3, t, True, False, ())) is not None]
    assert sizes == [3, 3, 1]


def test_the_choice_depends_on_the_set_and_not_on_the_order_of_arrival() -> None:
    """DESIGN section 5: the draw is keyed by (seed, epoch, t) over the items sorted by id."""
    arrivals = list(range(12))
    draws = []
    for seed in range(5):
        random.Random(seed).shuffle(arrivals)
        queue = buffered()
        for job in arrivals:
            queue.put(job, 0)
        drawn = queue.draw(4, 7, False, False, ())
        assert drawn is not None
        draws.append(drawn.jobs)
    assert all(jobs == draws[0] for jobs in draws)


def test_the_draw_sequence_equals_a_golden_one() -> None:
    """F21: a change of the generator or of its use is a change of every planned run."""
    queue = buffered(seed=3)
    for job in range(10):
        queue.put(job, 0)
    sequence = [d.jobs for t in range(4) if (d := queue.draw(3, t, True, False, ())) is not None]
    assert sequence == GOLDEN
    assert simulate_draws(12, 4, 6, 1, 2).tolist() == GOLDEN_PLANNED


def first_draws(draw: Callable[[int], int], n: int, times: int) -> float:
    counts = np.bincount([draw(seed) for seed in range(times)], minlength=n)
    return float(((counts - times / n) ** 2 / (times / n)).sum())


def test_the_first_draw_is_uniform() -> None:
    """F27: chi-square over 3,200 fresh seeds, 15 degrees, 1e-6 quantile 56.5; a draw that never takes item 5 fails."""

    def draw(seed: int) -> int:
        queue = buffered(seed)
        for job in range(16):
            queue.put(job, 0)
        drawn = queue.draw(1, 0, False, False, ())
        assert drawn is not None
        return drawn.jobs[0]

    assert first_draws(draw, 16, 3200) < CHI2_15
    assert first_draws(lambda seed: 6 if draw(seed) == 5 else draw(seed), 16, 3200) > CHI2_15


def test_every_pair_of_a_draw_is_equally_likely() -> None:
    """Draws without replacement: 16 ordered places of 4 x 4, the diagonal never; chi-square with 11 degrees, 1e-6."""
    counts = np.zeros((4, 4))
    for seed in range(4000):
        a, b = CounterRandom(seed, 1).sample(0, 4, 2)
        counts[a, b] += 1
    assert np.trace(counts) == 0
    off = counts[~np.eye(4, dtype=bool)]
    assert ((off - 4000 / 12) ** 2 / (4000 / 12)).sum() < 49.0


def test_max_age_forces_the_oldest_and_counts_it() -> None:
    queue = buffered(min_fill=1, max_age=5)
    for job in range(8):
        queue.put(job, 0)
    forced = 0
    for t in range(40):
        drawn = queue.draw(1, t, False, False, ())
        assert drawn is not None
        assert max(drawn.ages) <= 5 + 8
        forced += drawn.forced
        queue.put(8 + t, 0)
    assert forced > 0


def test_the_planned_queue_waits_for_the_jobs_it_names() -> None:
    """G7: nothing else is drawn, however much of it is there; F28."""
    queue = PlannedHSQueue(np.array([2, 0, 1, 3]), 2)
    for job in (3, 1, 0):
        queue.put(job, 0)
    assert queue.draw(2, 0, False, False, ()) is None
    assert queue.draw(2, 0, False, True, ()) is None
    queue.put(2, 0)
    assert [jobs_of(queue.draw(2, t, False, False, ())) for t in range(2)] == [[2, 0], [1, 3]]


def test_jobs_that_lost_their_place_are_drawn_after_the_planned_ones() -> None:
    """DESIGN section 5: windows appended to the epoch's end."""
    queue = PlannedHSQueue(np.arange(6), 2)
    queue.defer(1)
    queue.drop(4)
    for job in (0, 2, 3, 5):
        queue.put(job, 0)
    assert [jobs_of(queue.draw(2, t, False, False, ())) for t in range(3)] == [[0], [2, 3], [5]]
    assert queue.draw(2, 3, False, False, ()) is None
    queue.put(1, 0)
    assert queue.draw(2, 3, False, False, ()) is None
    assert jobs_of(queue.draw(2, 3, True, False, ())) == [1]


def jobs_of(drawn: Drawn | None) -> list[int]:
    assert drawn is not None
    return drawn.jobs


def test_the_bucketed_queue_stalls_on_a_rare_bucket_until_it_has_ended() -> None:
    """The oldest remedy for mixing: every bucket in turn, and everyone waits for the rarest."""
    queue = BucketedHSQueue(2)
    for job in range(6):
        queue.put(job, 0)
    assert queue.draw(2, 0, False, False, [0, 1]) is None
    assert jobs_of(queue.draw(2, 0, False, False, [0, 0])) == [0, 1]
    queue.put(6, 1)
    assert jobs_of(queue.draw(2, 1, False, False, [0, 0])) == [6, 2]


def test_the_bucketed_queue_passes_a_turn_when_producers_wait_for_room() -> None:
    """F29."""
    queue = BucketedHSQueue(2)
    for job in range(4):
        queue.put(job, 0)
    assert queue.draw(2, 0, False, False, [0, 1]) is None
    assert queue.passes == 0
    assert jobs_of(queue.draw(2, 0, False, True, [0, 1])) == [0, 1]
    assert queue.passes == 1


def test_each_drafter_has_its_own_fifo() -> None:
    queue = PerDrafterHSQueue(2)
    for job in range(5):
        queue.put(job, 0)
    drawn = queue.draw(4, 0, False, False, ())
    assert drawn is not None
    assert drawn.parts == [[0, 2], [1, 3]]
    assert queue.draw(4, 1, False, False, ()) is None
    drawn = queue.draw(4, 1, True, False, ())
    assert drawn is not None
    assert drawn.parts == [[4], []]


def test_where_the_window_does_not_divide_the_larger_share_goes_round() -> None:
    queue = PerDrafterHSQueue(2)
    for job in range(12):
        queue.put(job, 0)
    shares = [[len(p) for p in d.parts] for t in range(4) if (d := queue.draw(3, t, False, False, ())) and d.parts]
    assert shares == [[2, 1], [1, 2], [2, 1], [1, 2]]


def test_the_look_ahead_of_a_planned_order_stays_below_its_buffer() -> None:
    """So that a run whose room holds that many always has the next window's jobs leased."""
    for window, min_fill in ((4, 10), (8, 3)):
        order = simulate_draws(200, window, min_fill, 0, 0)
        assert sorted(order.tolist()) == list(range(200))
        for first in range(0, 200, window):
            assert max(order[first : first + window]) < first + max(window, min_fill)


def test_states_sum_to_the_number_of_jobs_and_only_move_along_their_arrows() -> None:
    """F20 and the ledger's own guards: each wrong move is refused."""
    ledger = Ledger(0, 3, max_attempts=2)
    lease = ledger.lease(0, 1, 9.0)
    assert (lease.attempt, lease.worker) == (0, 1)
    with pytest.raises(AssertionError, match="job 0 is leased, not pending"):
        ledger.lease(0, 1, 9.0)
    with pytest.raises(AssertionError, match="job 1 is pending, not ready"):
        ledger.draw(1)
    with pytest.raises(AssertionError, match="cannot come back"):
        ledger.back(2, "why")
    assert ledger.back(0, "first")
    assert not ledger.live(lease)
    assert ledger.fresh == 1
    second = ledger.lease(0, 2, 9.0)
    assert second.attempt == 1
    assert not ledger.back(0, "second")
    assert ledger.quarantined() == [0]
    assert ledger.reasons == {0: "second"}
    for job in (1, 2):
        ledger.lease(job, 0, 9.0)
        ledger.ready(job)
        ledger.draw(job)
        ledger.commit(job)
        assert sum(ledger.counts) == 3
    with pytest.raises(AssertionError, match="job 1 is committed, not drawn"):
        ledger.commit(1)
    assert ledger.complete
