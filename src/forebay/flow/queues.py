"""The buffer between targets and drafters, and its older relatives, behind one interface.

Guarantees: an item leaves when it is drawn and not before; after the end of input the rest is drawn below the min fill
(G4); the choice of BufferedHSQueue depends on the set of items and the draw's number, never on the order of arrival;
the sum of residences equals the sum over draws of the occupancy before the draw, for every policy.
An item with uses left is put again when its window is committed (each stay is a residence of its own), so that no
window holds it twice.
Holds job ids of one epoch, no tensors. A pure state machine. Called by the coordinator and, to plan draws, by `plan`.

`draw(k, t, ended, blocked, expected)`: k items wanted; t the draw's number; ended: nothing more will arrive; blocked:
producers wait for room, so that nothing more may arrive before a draw; expected[b]: jobs of bucket b still to arrive.
Returns None to wait. `force(k)` takes what is there: for the stalemate in which waiting would never end.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from forebay.flow.random import CounterRandom
from forebay.flow.uses import Uses


@dataclass(slots=True)
class Drawn:
    """Items of one window. `parts`: dealt to drafters by the queue itself, where its design does so."""

    jobs: list[int]
    ages: list[int]
    occupancy: int
    forced: int = 0
    parts: list[list[int]] | None = None


class Residence:
    """Ages of items, counted in draws of single items. Every queue keeps one."""

    def __init__(self) -> None:
        self.arrived: dict[int, int] = {}
        self.draws = 0
        self.sum_residence = 0
        self.sum_occupancy = 0

    def enter(self, job: int) -> None:
        assert job not in self.arrived, f"job {job} is in the queue already"
        self.arrived[job] = self.draws

    def leave(self, jobs: list[int]) -> Drawn:
        occupancy = len(self.arrived)
        ages = []
        for job in jobs:
            self.sum_occupancy += len(self.arrived)
            age = self.draws - self.arrived.pop(job)
            self.draws += 1
            self.sum_residence += age + 1
            ages.append(age)
        return Drawn(jobs, ages, occupancy)


class HSQueue(Protocol):
    """What the coordinator asks of a queue."""

    residence: Residence
    passes: int

    def __len__(self) -> int: ...
    def put(self, job: int, bucket: int) -> None: ...
    def draw(self, k: int, t: int, ended: bool, blocked: bool, expected: Sequence[int]) -> Drawn | None: ...
    def force(self, k: int, t: int) -> Drawn | None: ...


class BufferedHSQueue:
    """One pool with a min fill; a draw is uniform over what is there.

    With reuse the draws of an item are spread over windows: never two in one; not in two windows in a row while as
    many others are there (two windows of items: `min_fill` at least twice the window); at occupancy B an item comes
    back after B draws on average, whatever the reuse. The last `reuse` windows of an epoch wait for its last item and
    take first the items that have as many uses left as there are windows, so that none of them but the last is short.
    """

    def __init__(
        self, random: CounterRandom, min_fill: int, max_age: int | None = None, uses: Uses | None = None
    ) -> None:
        self.random = random
        self.min_fill = min_fill
        self.max_age = max_age
        self.uses = uses if uses is not None and uses.reuse > 1 else None
        self.rests: set[int] = set()  # the items of the last window, where they may come back
        self.items: list[int] = []
        self.residence = Residence()
        self.passes = 0

    def __len__(self) -> int:
        return len(self.items)

    def put(self, job: int, bucket: int) -> None:
        self.residence.enter(job)
        insort(self.items, job)

    def draw(self, k: int, t: int, ended: bool, blocked: bool, expected: Sequence[int]) -> Drawn | None:
        if len(self.items) < max(self.min_fill, k) and not ended:
            return None
        if self.uses is not None and self.uses.windows(k) <= self.uses.reuse and not ended:
            return None
        return self.force(k, t)

    def force(self, k: int, t: int) -> Drawn | None:
        if not self.items:
            return None
        self._remove(due := self._due(k))
        self._remove(old := self._overdue(k - len(due)))
        k = min(k - len(due) - len(old), len(self.items))
        drawn = self.residence.leave(due + old + (self._rested(k, t) if k else []))
        drawn.forced = len(old)
        if self.uses is not None:
            self.rests = set(drawn.jobs)
        return drawn

    def _remove(self, jobs: list[int]) -> None:
        for job in jobs:
            self.items.remove(job)

    def _rested(self, k: int, t: int) -> list[int]:
        """k items, uniform over those that were not in the last window, or all of these and as many as it takes."""
        if not self.rests:
            places = self.random.sample(t, len(self.items), k)
            jobs = [self.items[i] for i in places]
            for i in sorted(places, reverse=True):
                del self.items[i]
            return jobs
        certain: list[int] = []
        pool = [job for job in self.items if job not in self.rests]
        if len(pool) < k:
            certain, pool = pool, [job for job in self.items if job in self.rests]
        jobs = certain + [pool[i] for i in self.random.sample(t, len(pool), k - len(certain))]
        self._remove(jobs)
        return jobs

    def _due(self, k: int) -> list[int]:
        """Items that must be in this window and in every one that is left, or the epoch would need one more."""
        if self.uses is None or (windows := self.uses.windows(k)) > self.uses.reuse:
            return []
        return [job for job in self.items if self.uses.left(job) >= windows][:k]

    def _overdue(self, k: int) -> list[int]:
        if self.max_age is None:
            return []
        arrived, now = self.residence.arrived, self.residence.draws
        late = [job for job in self.items if now - arrived[job] >= self.max_age]
        return sorted(late, key=lambda job: (arrived[job], job))[:k]


class PlannedHSQueue:
    """Draws the windows that the plan names, and waits for their jobs.

    A job that lost its place (its attempt hung, its step was skipped) is deferred, with the uses it has left, to
    windows after the planned ones.
    """

    def __init__(self, order: npt.NDArray[Any], window: int, uses: Uses | None = None) -> None:
        """`order`: of `simulate_draws`."""
        self.order = order
        self.window = window
        self.uses = uses or Uses(int(order.max(initial=-1)) + 1)
        self.gone = order < 0  # places whose job will not come there
        self.start = 0
        self.items: set[int] = set()
        self.deferred: list[int] = []
        self.residence = Residence()
        self.passes = 0

    def __len__(self) -> int:
        return len(self.items)

    def put(self, job: int, bucket: int) -> None:
        self.residence.enter(job)
        self.items.add(job)

    def restore(self) -> None:
        """The uses that were committed before a resume have had their places."""
        seen = np.zeros(len(self.uses.used) + 1, dtype=np.int64)
        used = np.append(np.frombuffer(self.uses.used, dtype=np.uint8), 0)
        for first in range(0, len(self.order), self.window):
            place = slice(first, first + self.window)  # no job is in a window twice
            jobs = self.order[place]
            self.gone[place] |= seen[jobs] < used[jobs]
            seen[jobs] += 1

    def defer(self, job: int) -> None:
        self._lose(job)
        if job not in self.deferred:
            self.deferred.append(job)

    def drop(self, job: int) -> None:
        """The job is quarantined and will not come."""
        self._lose(job)
        if job in self.deferred:
            self.deferred.remove(job)

    def _lose(self, job: int) -> None:
        self.gone[self.start :] |= self.order[self.start :] == job

    def named(self) -> list[int]:
        """The jobs of the next planned window; empty when all planned windows are drawn."""
        while self.start < len(self.order):
            place = slice(self.start, self.start + self.window)
            left: list[int] = self.order[place][~self.gone[place]].tolist()
            if left:
                return left
            self.start += self.window
        return []

    def draw(self, k: int, t: int, ended: bool, blocked: bool, expected: Sequence[int]) -> Drawn | None:
        jobs = self.named()
        if jobs:
            if not self.items.issuperset(jobs):
                return None
            self.start += self.window
            return self._take(jobs)
        if not ended and sum(job in self.items for job in self.deferred) < k:
            return None
        return self.force(k, t)

    def force(self, k: int, t: int) -> Drawn | None:
        if self.named():
            return None
        ready = [job for job in self.deferred if job in self.items]
        return self._take(sorted(ready, key=self.uses.left, reverse=True)[:k])

    def _take(self, jobs: list[int]) -> Drawn | None:
        if not jobs:
            return None
        self.items.difference_update(jobs)
        for job in jobs:
            if job in self.deferred and self.uses.left(job) == 1:
                self.deferred.remove(job)
        return self.residence.leave(jobs)


class BucketedHSQueue:
    """A sub-queue per bucket; buckets take turns. A rare bucket that is still expected stalls everyone."""

    def __init__(self, buckets: int) -> None:
        self.lanes: list[deque[int]] = [deque() for _ in range(buckets)]
        self.turn = 0
        self.residence = Residence()
        self.passes = 0

    def __len__(self) -> int:
        return len(self.residence.arrived)

    def put(self, job: int, bucket: int) -> None:
        self.residence.enter(job)
        self.lanes[bucket].append(job)

    def draw(self, k: int, t: int, ended: bool, blocked: bool, expected: Sequence[int]) -> Drawn | None:
        if len(self) < k and not ended:
            return None
        left = [len(lane) for lane in self.lanes]
        taken: list[int] = []
        turn, passes = self.turn, 0
        while len(taken) < min(k, len(self)):
            if left[turn]:
                left[turn] -= 1
                taken.append(turn)
            elif not ended and expected[turn]:
                if not blocked:
                    return None
                passes += 1
            turn = (turn + 1) % len(self.lanes)
        self.turn = turn
        self.passes += passes
        return self._take(taken)

    def force(self, k: int, t: int) -> Drawn | None:
        return self.draw(min(k, len(self)), t, True, True, ())

    def _take(self, buckets: list[int]) -> Drawn | None:
        if not buckets:
            return None
        return self.residence.leave([self.lanes[b].popleft() for b in buckets])


class PerDrafterHSQueue:
    """A FIFO per drafter, filled in turn: what a drafter sees is decided at the put."""

    def __init__(self, drafters: int) -> None:
        self.lanes: list[deque[int]] = [deque() for _ in range(drafters)]
        self.turn = 0
        self.residence = Residence()
        self.passes = 0

    def __len__(self) -> int:
        return len(self.residence.arrived)

    def put(self, job: int, bucket: int) -> None:
        self.residence.enter(job)
        self.lanes[self.turn].append(job)
        self.turn = (self.turn + 1) % len(self.lanes)

    def draw(self, k: int, t: int, ended: bool, blocked: bool, expected: Sequence[int]) -> Drawn | None:
        n = len(self.lanes)
        # Where the window does not divide, the larger share goes round, as the filling does.
        shares = [k // n + ((i - t * k) % n < k % n) for i in range(n)]
        if all(len(lane) >= share for lane, share in zip(self.lanes, shares, strict=True)):
            return self._take(shares)
        return self.force(k, t) if ended else None

    def force(self, k: int, t: int) -> Drawn | None:
        shares = [0] * len(self.lanes)
        for _ in range(min(k, len(self))):
            longest = max(range(len(shares)), key=lambda i: (len(self.lanes[i]) - shares[i], -shares[i]))
            shares[longest] += 1
        return self._take(shares)

    def _take(self, shares: list[int]) -> Drawn | None:
        parts = [[lane.popleft() for _ in range(share)] for lane, share in zip(self.lanes, shares, strict=True)]
        jobs = [job for part in parts for job in part]
        if not jobs:
            return None
        drawn = self.residence.leave(jobs)
        drawn.parts = parts
        return drawn


def simulate_draws(
    jobs: int, window: int, min_fill: int, seed: int, epoch: int, max_age: int | None = None, reuse: int = 1
) -> npt.NDArray[np.int32]:
    """The order of draws when jobs 0..n-1 arrive in plan order and each draw is made as soon as it is allowed.

    The look-ahead stays below max(min_fill, window) jobs, so that a run with room for that many always has the next
    window's jobs leased. Returns int32[n], each job `reuse` times, in windows of `window`, the last one short. Where
    the look-ahead is too small for full windows at the epoch's end, short ones are filled up with -1.
    """
    uses = Uses(jobs, reuse)
    queue = BufferedHSQueue(CounterRandom(seed, epoch), min_fill, max_age, uses)
    order: list[int] = []
    arrived = t = 0
    while uses.open:
        while arrived < jobs and len(queue) < max(min_fill, window):
            queue.put(arrived, 0)
            arrived += 1
        drawn = queue.draw(window, t, arrived == jobs, False, ()) or queue.force(window, t)
        assert drawn is not None
        order += [-1] * (-len(order) % window) + drawn.jobs
        for job in drawn.jobs:
            if not uses.take(job):
                queue.put(job, 0)
        t += 1
    return np.array(order, dtype=np.int32)
