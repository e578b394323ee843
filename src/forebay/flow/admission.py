"""May a job be leased now? Pure arithmetic over bytes and counters, and the check that no deadlock can arise.

Guarantees: bytes charged never exceed the budget (G2); a room is charged once and freed once, whoever asks how often; a
configuration that could deadlock is refused before work starts, with both numbers and the fix (G3).
Knows nothing of jobs' states. Called by the coordinator; `check_budget` by it and by the commands.
"""

from __future__ import annotations

from collections.abc import Hashable

from forebay.errors import ConfigError

AGE_FACTOR = 4


def human_bytes(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.4g} {unit}"
        n /= 1024
    return f"{n:.4g} TiB"


def check_budget(
    budget: int,
    largest: int,
    min_fill: int,
    window: int,
    targets: int,
    jobs: int,
    max_age: int | None = None,
    reuse: int = 1,
) -> list[str]:
    """Refuse what deadlocks (ConfigError); return warnings about what will run badly."""
    name, room = ("min_fill", min_fill) if min_fill >= window else ("window", window)
    if (room + 1) * largest > budget:
        fitting = budget // max(largest, 1) - 1
        fix = f"lower {name} to {fitting} or " if fitting >= 1 else ""
        raise ConfigError(
            f"({name} {room} + 1) x largest item {human_bytes(largest)} = {human_bytes((room + 1) * largest)} exceeds "
            f"buffer.bytes {human_bytes(budget)}: {fix}raise buffer.bytes to {human_bytes((room + 1) * largest)}"
        )
    capacity = budget // max(largest, 1)
    if max_age is not None and max_age < AGE_FACTOR * capacity:
        raise ConfigError(
            f"max_age {max_age} is below {AGE_FACTOR} x the buffer's {capacity} items, which makes it a FIFO: "
            f"raise buffer.max_age to {AGE_FACTOR * capacity} or leave it null"
        )
    warnings = []
    easy = room + window + targets
    if capacity < easy:
        warnings.append(
            f"buffer.bytes {human_bytes(budget)} holds {capacity} items, below the {easy} (max(min_fill, window) + "
            f"window + targets) that let both sides work at once: raise buffer.bytes to {human_bytes(easy * largest)}"
        )
    if reuse > 1 and min_fill < 2 * window:
        warnings.append(
            f"with buffer.reuse {reuse} an item may be used in two windows in a row, because min_fill {min_fill} is "
            f"below two windows of {window}: raise buffer.min_fill to {2 * window}"
        )
    if capacity < reuse * window:
        warnings.append(
            f"buffer.bytes {human_bytes(budget)} holds {capacity} items, below buffer.reuse {reuse} x window {window}: "
            f"an epoch's last windows may be short; raise buffer.bytes to {human_bytes(reuse * window * largest)}"
        )
    if min_fill > jobs:
        warnings.append(f"min_fill {min_fill} is above the {jobs} jobs of an epoch: draws start at the end of input")
    return warnings


class Admission:
    """Rooms of a byte budget, each under a key of its own."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.charged = 0
        self.peak = 0
        self.rooms: dict[Hashable, int] = {}

    def fits(self, nbytes: int) -> bool:
        return self.charged + nbytes <= self.budget

    def charge(self, key: Hashable, nbytes: int) -> None:
        assert key not in self.rooms, f"room of {key} is charged already"
        assert self.fits(nbytes), f"{nbytes} bytes on top of {self.charged} exceed {self.budget}"
        self.rooms[key] = nbytes
        self.charged += nbytes
        self.peak = max(self.peak, self.charged)

    def free(self, key: Hashable) -> bool:
        """Give a room back. False if it was given back already."""
        nbytes = self.rooms.pop(key, None)
        if nbytes is None:
            return False
        self.charged -= nbytes
        return True

    def rename(self, key: Hashable, new: Hashable) -> None:
        """Keep a room under another key: an attempt that hangs goes on occupying memory that its job no longer owns."""
        self.rooms[new] = self.rooms.pop(key)


class Blocked:
    """Seconds that actors spent waiting, by reason."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since: dict[Hashable, tuple[str, float]] = {}

    def wait(self, actor: Hashable, reason: str, now: float) -> None:
        """The actor asked and was told to wait."""
        before = self._since.get(actor)
        if before is None:
            self._since[actor] = (reason, now)
        elif before[0] != reason:
            self.go(actor, now)
            self._since[actor] = (reason, now)

    def go(self, actor: Hashable, now: float) -> None:
        """The actor got what it asked for."""
        before = self._since.pop(actor, None)
        if before is not None:
            self.seconds[before[0]] = self.seconds.get(before[0], 0.0) + now - before[1]

    def until(self, now: float) -> dict[str, float]:
        """Seconds by reason, waits that go on included."""
        out = dict(self.seconds)
        for reason, since in self._since.values():
            out[reason] = out.get(reason, 0.0) + now - since
        return out

    def waiting(self) -> dict[str, int]:
        """How many actors wait now, by reason."""
        out: dict[str, int] = {}
        for reason, _ in self._since.values():
            out[reason] = out.get(reason, 0) + 1
        return out
