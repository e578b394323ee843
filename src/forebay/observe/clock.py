"""Where a stage's time goes: busy, or waiting and for what.

Guarantees: seconds are attributed once; a wait that is still going on is visible from outside (`open_waits`), with who
waits, for what, and since when. Thread-safe by one owner per worker's clock. Called by the runtime and the stages.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator

#: What a wait's name means, for people.
WORDS = {
    "producer_wait_room": "room in the buffer",
    "producer_wait_work": "a job to do",
    "consumer_wait_fill": "the buffer to reach its min fill",
    "consumer_wait_end": "the epoch's last jobs",
    "consumer_wait_plan": "the next epoch's plan",
    "jobs": "jobs to prepare",
    "prefetch": "its host batch",
    "turn": "its turn on the shared device",
    "checkpoint": "the checkpoint before this one",
}


def in_words(reason: str) -> str:
    """A wait's name with its meaning."""
    return f"{WORDS[reason]} ({reason})" if reason in WORDS else reason


class WorkerClock:
    """Busy and waiting seconds of one worker; only its own thread writes to it."""

    def __init__(self, stage: str, name: str) -> None:
        self.stage, self.name = stage, name
        self.busy_s = 0.0
        self.wait_s: dict[str, float] = defaultdict(float)
        self.open: tuple[str, float] | None = None  # (what for, since), monotonic seconds
        self.jobs = 0  # done, with so many real tokens
        self.tokens = 0

    def did(self, tokens: int) -> None:
        """A job is done."""
        self.jobs += 1
        self.tokens += tokens

    def report(self, token_budget: int) -> dict[str, object]:
        """`busy_s`, `wait_s` by reason; of a worker that does jobs also `jobs` and their mean `fill` of the budget."""
        waits = {reason: round(seconds, 3) for reason, seconds in list(self.wait_s.items())}
        out: dict[str, object] = {"busy_s": round(self.busy_s, 3), "wait_s": waits}
        if self.jobs:
            out |= {"jobs": self.jobs, "fill": round(self.tokens / (self.jobs * token_budget), 4)}
        return out

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.busy_s += time.monotonic() - start

    @contextlib.contextmanager
    def waiting(self, reason: str) -> Iterator[None]:
        start = time.monotonic()
        self.open = (reason, start)
        try:
            yield
        finally:
            self.open = None
            self.wait_s[reason] += time.monotonic() - start


class Clocks:
    """The clocks of a run, by stage."""

    def __init__(self) -> None:
        self.workers: list[WorkerClock] = []
        self.started = time.monotonic()

    def worker(self, stage: str, name: str) -> WorkerClock:
        clock = WorkerClock(stage, name)
        self.workers.append(clock)
        return clock

    def shares(self) -> dict[str, dict[str, object]]:
        """Per stage: `busy_share`, `wait_share` and `waits` (share by reason) of the stage's worker-seconds so far."""
        elapsed = max(1e-9, time.monotonic() - self.started)
        out: dict[str, dict[str, object]] = {}
        for stage in dict.fromkeys(w.stage for w in self.workers):
            mine = [w for w in self.workers if w.stage == stage]
            total = elapsed * len(mine)
            waits: dict[str, float] = defaultdict(float)
            for worker in mine:
                for reason, seconds in list(worker.wait_s.items()):
                    waits[reason] += seconds / total
                open_wait = worker.open
                if open_wait is not None:
                    waits[open_wait[0]] += (time.monotonic() - open_wait[1]) / total
            out[stage] = {
                "busy_share": round(sum(w.busy_s for w in mine) / total, 4),
                "wait_share": round(sum(waits.values()), 4),
                "waits": {k: round(v, 4) for k, v in sorted(waits.items())},
            }
        return out

    def open_waits(self, longer_than_s: float = 0.0) -> list[dict[str, object]]:
        """Waits going on now: `worker`, `waits_for`, `seconds`."""
        now = time.monotonic()
        found = []
        for worker in self.workers:
            wait = worker.open
            if wait is not None and now - wait[1] >= longer_than_s:
                found.append({"worker": worker.name, "waits_for": wait[0], "seconds": round(now - wait[1], 1)})
        return found
