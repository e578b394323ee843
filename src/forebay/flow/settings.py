"""What the flow is asked and what it answers: settings, waits, windows, and how a window is dealt to replicas.

Guarantees: settings that cannot work together are refused when they are made. Used by the coordinator and its callers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.config import RunConfig
from forebay.errors import ConfigError, ForebayError


class FlowFailed(ForebayError):
    """The run has failed; the first cause is `__cause__`."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Not now, and why: one of the names under which blocked seconds are counted."""

    reason: str


WAIT_ROOM = Wait("producer_wait_room")
WAIT_WORK = Wait("producer_wait_work")
WAIT_FILL = Wait("consumer_wait_fill")
WAIT_END = Wait("consumer_wait_end")
WAIT_PLAN = Wait("consumer_wait_plan")


@dataclass(frozen=True, slots=True)
class Window:
    """The items of one optimizer step. `number` counts the epoch's draws; `parts` deals the jobs to drafters.

    `uses`: which use (0-based) of each job this is. `last`: the jobs whose room is free after it. `left`: windows that
    the epochs at hand still need at least, this one included.
    """

    step: int
    epoch: int
    number: int
    jobs: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]
    uses: dict[int, int]
    last: frozenset[int]
    left: int


@dataclass(frozen=True, slots=True)
class FlowSettings:
    """What the flow needs of a run's configuration."""

    budget_bytes: int
    window: int
    min_fill: int = 10
    targets: int = 1
    drafters: int = 1
    dispatch: str = "shared"
    queue: str = "buffered"
    draw: str = "live"
    reuse: int = 1
    max_age: int | None = None
    max_attempts: int = 3
    on_poison: str = "stop"
    lease_s: float = 600.0
    prefetch_jobs: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        for name, known in (
            ("dispatch", ("shared", "per_target")),
            ("queue", ("buffered", "bucketed", "per_drafter")),
            ("draw", ("live", "planned")),
            ("on_poison", ("stop", "continue")),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} '{getattr(self, name)}' is unknown: choose one of {', '.join(known)}")
        if self.draw == "planned" and (self.dispatch, self.queue) != ("shared", "buffered"):
            raise ConfigError(
                f"draw: planned needs dispatch: shared and queue: buffered, not {self.dispatch} and {self.queue}"
            )

    @classmethod
    def from_config(cls, config: RunConfig) -> FlowSettings:
        return cls(
            budget_bytes=config.buffer.bytes,
            window=config.optim.window,
            min_fill=config.buffer.min_fill,
            targets=len(config.runtime.targets),
            drafters=len(config.runtime.drafters),
            dispatch=config.buffer.dispatch,
            queue=config.buffer.queue,
            draw=config.buffer.draw,
            reuse=config.buffer.reuse,
            max_age=config.buffer.max_age,
            max_attempts=config.runtime.max_attempts,
            on_poison=config.runtime.on_poison,
            lease_s=config.runtime.lease_s,
            prefetch_jobs=config.runtime.prefetch_jobs,
            seed=config.seed,
        )


def deal(jobs: Sequence[int], tokens: Sequence[int], replicas: int) -> tuple[tuple[int, ...], ...]:
    """Deal jobs to replicas by token load: the heaviest first, each to the lightest replica."""
    if replicas == 1:
        return (tuple(jobs),)
    parts: list[list[int]] = [[] for _ in range(replicas)]
    load = [(0, 0, i) for i in range(replicas)]
    for job, size in sorted(zip(jobs, tokens, strict=True), key=lambda pair: (-pair[1], pair[0])):
        total, count, i = min(load)
        parts[i].append(job)
        load[i] = (total + size, count + 1, i)
    return tuple(tuple(part) for part in parts)
