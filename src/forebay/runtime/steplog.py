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
from forebay.observe.machine import memory
from forebay.observe.metrics import MetricsLog
from forebay.stages.train import Outcome

OWN_WAITS = ("turn", "checkpoint")  # a drafter's waits that are not for data
COUNTERS = ("requeues", "expired", "quarantined", "stale_puts", "skipped_steps", "epoch_passes")
FROM_SUMS = ("accuracy", "accuracy_by_slot", "acceptance_by_slot", "uniform_accept_length")


class StepLog:
    """Lines of steps, some of them still waiting for the device's numbers."""

    def __init__(
        self,
        log: MetricsLog,
        clocks: Clocks,
        *,
        every: int,
        total_steps: int,
        facts: Callable[[Any], dict[str, Any]],
        token_budget: int,
        stats: Callable[[], dict[str, Any]],
        show: Callable[[str, int], None],
    ) -> None:
        """`facts`: of a window, from the plan: `supervised` tokens, `slot_room`, and fields of the line.
        `show(note, steps)`: for people, when lines are written."""
        self._log, self._clocks, self._every, self._total_steps = log, clocks, every, total_steps
        self._facts, self._token_budget, self._stats, self._show = facts, token_budget, stats, show
        self._waiting: list[tuple[int, dict[str, Any], Outcome]] = []
        self._tokens = self._supervised = self._steps = 0

    def add(self, step: int, window: Any, outcome: Outcome) -> None:
        """Note a step that was taken (or not: `outcome.finite`); `step` is how many have been taken."""
        elapsed = max(1e-9, time.monotonic() - self._clocks.started)
        self._tokens += outcome.tokens
        facts = self._facts(window)
        self._supervised += facts.pop("supervised")
        slot_fill = outcome.slots / max(1, facts.pop("slot_room"))
        self._steps += outcome.finite
        waits = self._clocks.shares()["drafter"]["waits"]
        stats = self._stats()
        epoch = next((m for m in stats["mixing"] if m["epoch"] == window.epoch), stats["mixing"][-1])
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
            "mixing_r_epoch": epoch["r"],
            "age_p50": epoch["age_p50"],
            "age_p99": epoch["age_p99"],
            "forced_share": epoch["forced_share"],
            "buffered_items": stats["occupancy"],
            "charged_bytes": stats["charged_bytes"],
            "charged_share": round(stats["charged_bytes"] / stats["budget_bytes"], 4),
            "jobs_by_state": stats["jobs"],
            **{name: stats[name] for name in COUNTERS},
            **facts,
            "slot_fill_share": round(slot_fill, 4),
            "workers": {w.name: w.report(self._token_budget) for w in self._clocks.workers if w.stage != "prefetch"},
            **memory(),
        }
        self._waiting.append((step, line, outcome))
        if len(self._waiting) >= self._every or step >= self._total_steps:
            self.flush()

    def flush(self) -> None:
        """Write the waiting lines. Waits for the device."""
        waiting, self._waiting = self._waiting, []
        for step, line, outcome in waiting:
            line["loss"], line["grad_norm"] = outcome.loss, outcome.grad_norm
            line["loss_by_bucket"] = outcome.loss_by_bucket
            line |= {name: value for name, value in outcome.sums.report().items() if name in FROM_SUMS}
            self._log.write("step", step, line)
        if waiting:
            note = f"loss {line['loss']:.3f}  uniform accept {line['uniform_accept_length']:.2f}"
            note += f"  {line['tokens_per_s']:.0f} tokens/s ({line['supervised_tokens_per_s']:.0f} supervised)"
            note += f"  data wait {line['data_wait_share']:.0%}"
            self._show(note, sum(outcome.finite for _, _, outcome in waiting))
