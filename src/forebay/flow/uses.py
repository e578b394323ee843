"""How often the jobs of an epoch have been used, and how many windows are still needed: the arithmetic of reuse.

An item may be drawn `reuse` times (k below) before its room is freed, at most once in a window. Guarantees: a job is
used k times and never more; `windows` is the least number of windows in which what is left can be drawn, and is
reached where each of them takes every job that has as many uses left as there are windows (as a plant with w machines
finishes jobs of unequal length soonest by never leaving the longest ones behind). Holds counts only. Owned by the
ledger; read by the queues and, to plan draws, by `simulate_draws`.
"""

from __future__ import annotations


class Uses:
    """`used[job]`: its committed uses. `jobs_with[m]`: how many jobs have m uses left."""

    def __init__(self, jobs: int, reuse: int = 1) -> None:
        self.reuse = reuse
        self.used = bytearray(jobs)
        self.jobs_with = [0] * reuse + [jobs]

    def left(self, job: int) -> int:
        """Uses that the job still owes, the one in hand included."""
        return self.reuse - self.used[job]

    def take(self, job: int, times: int = 1) -> bool:
        """The job was used. Returns whether that was its last use."""
        left = self.left(job)
        assert times <= left, f"job {job} was used {self.used[job]} of {self.reuse} times: {times} more are too many"
        self.used[job] += times
        self.jobs_with[left] -= 1
        self.jobs_with[left - times] += 1
        return left == times

    def give_up(self, job: int) -> None:
        """The job is quarantined: its uses left will not come."""
        self.jobs_with[self.left(job)] -= 1

    @property
    def open(self) -> int:
        """Uses left of all jobs."""
        return sum(left * jobs for left, jobs in enumerate(self.jobs_with))

    def windows(self, window: int) -> int:
        """The least number of windows for what is left: no job twice in one, `window` items in each."""
        most = max((left for left, jobs in enumerate(self.jobs_with) if jobs), default=0)
        return max(most, -(-self.open // window))


def windows_of(jobs: int, reuse: int, window: int) -> int:
    """Windows of an epoch: ceil(jobs * reuse / window), and `reuse` at least."""
    return Uses(jobs, reuse).windows(window)
