"""Job states, leases, attempts, commits of one epoch: the only owner of "what remains to be done" (guarantee G1).

    PENDING -> LEASED(worker, attempt) -> READY -> DRAWN -> COMMITTED, and QUARANTINED

A job with uses left goes from DRAWN back to READY when its window is committed (`uses`); COMMITTED is after the last.

Guarantees: the counts by state sum to the number of jobs at every instant; each use of a job is committed once; an
answer counts only if it carries the lease that is live. Knows nothing of room, order of draws or time beyond a lease's
expiry. A pure state machine: no locks, no clocks. Called by the coordinator alone.
"""

from __future__ import annotations

import base64
import zlib
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.errors import ContractError
from forebay.flow.uses import Uses

PENDING, LEASED, READY, DRAWN, COMMITTED, QUARANTINED = range(6)
STATES = ("pending", "leased", "ready", "drawn", "committed", "quarantined")


@dataclass(frozen=True, slots=True)
class Lease:
    """One attempt of one job by one worker; `expires` is the latest instant at which it may be silent."""

    epoch: int
    job: int
    attempt: int
    worker: int
    expires: float


class Ledger:
    """The states of an epoch's jobs 0..n-1.

    Jobs are leased in plan order through `cursor`. Jobs that came back wait in `returned` (leased before the others) or
    in `late` (after them), sorted by id.
    """

    def __init__(self, epoch: int, jobs: int, max_attempts: int = 3, reuse: int = 1) -> None:
        self.epoch = epoch
        self.uses = Uses(jobs, reuse)
        self.jobs = jobs
        self.max_attempts = max_attempts
        self.state = bytearray(jobs)
        self.attempt = bytearray(jobs)
        self.counts = [jobs, 0, 0, 0, 0, 0]
        self.cursor = 0
        self.returned: list[int] = []
        self.late: list[int] = []
        self.leases: dict[int, Lease] = {}
        self.reasons: dict[int, str] = {}

    def _move(self, job: int, before: int, after: int) -> None:
        assert self.state[job] == before, f"job {job} is {STATES[self.state[job]]}, not {STATES[before]}"
        self.state[job] = after
        self.counts[before] -= 1
        self.counts[after] += 1

    @property
    def ended(self) -> bool:
        """The end of input: nothing can become ready any more."""
        return self.counts[PENDING] == 0 and self.counts[LEASED] == 0

    @property
    def complete(self) -> bool:
        return self.counts[COMMITTED] + self.counts[QUARANTINED] == self.jobs

    @property
    def fresh(self) -> int | None:
        """The next job in plan order that has not come back."""
        while self.cursor < self.jobs and not self.waits_its_turn(self.cursor):
            self.cursor += 1
        return self.cursor if self.cursor < self.jobs else None

    def waits_its_turn(self, job: int) -> bool:
        if self.state[job] != PENDING:
            return False
        return not (self.attempt[job] and (job in self.returned or job in self.late))

    def lease(self, job: int, worker: int, expires: float) -> Lease:
        self._move(job, PENDING, LEASED)
        for came_back in (self.returned, self.late):
            if job in came_back:
                came_back.remove(job)
        lease = Lease(self.epoch, job, self.attempt[job], worker, expires)
        self.leases[job] = lease
        return lease

    def live(self, lease: Lease) -> bool:
        """Whether this attempt still owns its job."""
        held = self.leases.get(lease.job)
        return held is not None and held.attempt == lease.attempt and held.worker == lease.worker

    def renew(self, lease: Lease, expires: float) -> Lease:
        lease = Lease(lease.epoch, lease.job, lease.attempt, lease.worker, expires)
        self.leases[lease.job] = lease
        return lease

    def ready(self, job: int) -> None:
        self._move(job, LEASED, READY)
        del self.leases[job]

    def draw(self, job: int) -> None:
        self._move(job, READY, DRAWN)

    def commit(self, job: int) -> bool:
        """One more use is in the weights. Returns whether it was the last; else the job is READY again."""
        last = self.uses.left(job) <= 1
        self._move(job, DRAWN, COMMITTED if last else READY)
        return self.uses.take(job)

    def back(self, job: int, reason: str, late: bool = False) -> bool:
        """A leased or drawn job did not succeed: one attempt more, or QUARANTINED.

        Returns whether it is pending again.
        """
        before = self.state[job]
        assert before in (LEASED, DRAWN), f"job {job} is {STATES[before]} and cannot come back"
        self.leases.pop(job, None)
        self.reasons[job] = reason
        self.attempt[job] += 1
        if self.attempt[job] >= self.max_attempts:
            self._move(job, before, QUARANTINED)
            self.uses.give_up(job)
            return False
        self._move(job, before, PENDING)
        insort(self.late if late else self.returned, job)
        return True

    def quarantined(self) -> list[int]:
        return [job for job in self.reasons if self.state[job] == QUARANTINED]

    def snapshot(self) -> dict[str, Any]:
        """JSON-able; what is leased, ready or drawn counts as pending, because items are never saved.

        `committed`: a bitmap of the jobs for each use, the first use first.
        """
        reuse = self.uses.reuse
        done = np.frombuffer(self.uses.used, dtype=np.uint8) > np.arange(reuse)[:, None]
        open_jobs = [job for job in self.reasons if self.state[job] != COMMITTED]
        return {
            "epoch": self.epoch,
            "jobs": self.jobs,
            "reuse": reuse,
            "committed": base64.b64encode(zlib.compress(np.packbits(done).tobytes(), 1)).decode(),
            "quarantined": {str(job): self.reasons[job] for job in self.quarantined()},
            "attempts": {str(job): self.attempt[job] for job in open_jobs},
            "reasons": {str(job): self.reasons[job] for job in open_jobs},
        }

    def restore(self, saved: dict[str, Any], late: Sequence[int] = ()) -> None:
        """Take over a snapshot, on a ledger that nothing has touched yet. `late`: jobs to lease after the others."""
        if saved["jobs"] != self.jobs or saved["epoch"] != self.epoch:
            raise ContractError(
                f"the checkpoint's ledger is of epoch {saved['epoch']} with {saved['jobs']} jobs, the plan of epoch "
                f"{self.epoch} with {self.jobs}: resume with the plan that the run was started with"
            )
        reuse = self.uses.reuse
        if saved.get("reuse", 1) != reuse:
            raise ContractError(
                f"the checkpoint's ledger counts {saved.get('reuse', 1)} uses of each job (buffer.reuse), this run "
                f"{reuse}: resume with the reuse that the run was started with"
            )
        packed = np.frombuffer(zlib.decompress(base64.b64decode(saved["committed"])), dtype=np.uint8)
        used = np.unpackbits(packed, count=reuse * self.jobs).reshape(reuse, self.jobs).sum(axis=0)
        for job in np.flatnonzero(used).tolist():
            if self.uses.take(job, int(used[job])):
                self._move(job, PENDING, COMMITTED)
        for name, attempts in saved["attempts"].items():
            self.attempt[int(name)] = attempts
            self.reasons[int(name)] = saved["reasons"][name]
        for name in saved["quarantined"]:
            self._move(int(name), PENDING, QUARANTINED)
            self.uses.give_up(int(name))
        self.late = sorted(late)
