"""The log of the steps: what each one gave and how fast the run is, read from the device every few steps.

Guarantees: every step has its line in `metrics.jsonl`, in order, with its own loss and the time at which it ended.
What the host knows is noted at once; what the device knows (loss, gradient norm, hits) is read for all waiting lines
together, every `every` steps or when `flush` is called, so that nothing else makes the host wait for the device.
Called by `runtime.training`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from forebay.observe.clock import Clocks
from forebay.observe.metrics import MetricsLog
from forebay.stages.train import Outcome

OWN_WAITS = ("turn", "checkpoint")  # a drafter's waits that are not for data


class StepLog:
    """Lines of steps, some of them still waiting for the device's numbers."""

    def __init__(
        self,
        log: MetricsLog,
        clocks: Clocks,
        *,
        every: int,
        total_steps: int,
        supervised: Callable[[Any], int],
        stats: Callable[[], dict[str, Any]],
        show: Callable[[str, int], None],
    ) -> None:
        """`supervised`: supervised tokens of a window. `show(note, steps)`: for people, when lines are written."""
        self._log, self._clocks, self._every, self._total_steps = log, clocks, every, total_steps
        self._supervised_of, self._stats, self._show = supervised, stats, show
        self._waiting: list[tuple[int, dict[str, Any], Outcome]] = []
        self._tokens = self._supervised = self._steps = 0

    def add(self, step: int, window: Any, outcome: Outcome) -> None:
        """Note a step that was taken (or not: `outcome.finite`); `step` is how many have been taken."""
        elapsed = max(1e-9, time.monotonic() - self._clocks.started)
        self._tokens += outcome.tokens
        self._supervised += self._supervised_of(window)
        self._steps += outcome.finite
        waits = self._clocks.shares()["drafter"]["waits"]
        stats = self._stats()
        line = {
            "t": self._log.seconds,
            "epoch": window.epoch,
            "lr": outcome.lr,
            "finite": outcome.finite,
            "jobs": sorted(window.jobs),
            "tokens": outcome.tokens,
            "slots": outcome.slots,
            "tokens_per_s": round(self._tokens / elapsed, 1),
            "supervised_tokens_per_s": round(self._supervised / elapsed, 1),
            "data_wait_share": round(sum(v for k, v in waits.items() if k not in OWN_WAITS), 4),
            "eta_s": round((self._total_steps - step) * elapsed / max(1, self._steps), 1),
            "mixing_r": stats["last_window"]["r"],
            "occupancy": stats["last_window"]["occupancy"],
            "age_max": stats["last_window"]["age_max"],
            "charged_bytes": stats["charged_bytes"],
        }
        self._waiting.append((step, line, outcome))
        if len(self._waiting) >= self._every or step >= self._total_steps:
            self.flush()

    def flush(self) -> None:
        """Write the waiting lines. Waits for the device."""
        waiting, self._waiting = self._waiting, []
        for step, line, outcome in waiting:
            line["loss"], line["grad_norm"] = outcome.loss, outcome.grad_norm
            line["uniform_accept_length"] = outcome.sums.report()["uniform_accept_length"]
            self._log.write("step", step, line)
        if waiting:
            note = f"loss {line['loss']:.3f}  uniform accept {line['uniform_accept_length']:.2f}"
            note += f"  {line['tokens_per_s']:.0f} tokens/s ({line['supervised_tokens_per_s']:.0f} supervised)"
            note += f"  data wait {line['data_wait_share']:.0%}"
            self._show(note, sum(outcome.finite for _, _, outcome in waiting))
