"""A run in one process: a thread per target, prefetch threads, and the training on the calling thread.

Guarantees: however a run ends, nothing is left running, open or half written, and the message says how to go on.
Called by `api`.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from forebay.config import RunConfig
from forebay.errors import ForebayError
from forebay.observe.clock import Clocks
from forebay.observe.console import say
from forebay.runtime.assembly import Assembly
from forebay.runtime.extraction import Extraction, slot_pool
from forebay.runtime.faults import Faults
from forebay.runtime.run import Run
from forebay.runtime.shell import FlowShell
from forebay.runtime.threads import run_threads
from forebay.runtime.training import Training, use_threads
from forebay.runtime.turn import Turn
from forebay.runtime.watchdog import Watchdog, signals


class LocalRuntime:
    """One run, fresh or resumed. `train()` goes on to the end (or to a stop) and returns the summary."""

    def __init__(
        self,
        config: RunConfig,
        *,
        resume: bool = False,
        allow_change: frozenset[str] = frozenset(),
        quiet: bool = False,
    ) -> None:
        self.config = config
        faults = Faults(config.faults, config.run_dir, lambda: self.training.step.taken)
        self.run = Run(config, resume, faults, (lambda text: None) if quiet else say)
        self.models = Assembly(config, self.run.saved, self.run.say, faults.store(config), allow_change)
        self.targets = self.models.targets
        self.run.say(f"memory, at most: {self.models.memory().describe()}")
        self.run.open(self.models.prepared)
        try:
            self._build(faults, quiet)
        except BaseException:
            self.run.close()
            raise

    def _build(self, faults: Faults, quiet: bool) -> None:
        config, run, models = self.config, self.run, self.models
        largest = max(int(plan.nbytes.max()) for plan in run.plans)
        self.pool = slot_pool(config, models.prepared, models.target, config.buffer.bytes // largest)
        self.shell = FlowShell(run.coordinator, on_discard=lambda item: self.pool.release(item.slot))
        same = config.runtime.targets == config.runtime.drafters
        sharing, gpu = config.runtime.device_sharing, models.target.device.type == "cuda"
        if sharing == "auto":  # one thread a role wastes less than two that wait for each other at every product
            sharing = "split" if gpu or models.cores > 1 else "alternate"
        alternate = sharing == "alternate" and same and len(self.targets) == 1
        self.threads = models.cores if alternate else max(1, models.cores // 2)
        self.turn = Turn(alternate, self.shell.failed)
        self.in_use = [Turn(True, self.shell.failed) for _ in self.targets]
        self.extraction = Extraction(config, models.prepared, run.plans, faults, self.pool)
        self.clocks = Clocks()
        self.training = Training(run, models, self.shell, self.clocks, self.turn, self.in_use[0], quiet)

    def extract(self, number: int) -> Any:
        """Target `number`'s work: host batch -> item."""
        return self.extraction.compute(self.targets[number], number, self.in_use[number])

    def release(self, item: Any) -> None:
        self.pool.release(item.slot)

    def train(self) -> dict[str, Any]:
        """Train until every job is committed or a stop is asked for; checkpoint; evaluate; export; summarise."""
        run = self.run
        watchdog = Watchdog(
            self.shell,
            self.clocks,
            stall_s=self.config.runtime.stall_s,
            say=run.say,
            stacks=run.folder / "stacks.txt",
            status=lambda: run.write_status(self._status),
        )
        with signals(watchdog, run.say):
            try:
                self._train(watchdog)
                summary = self.training.summary()
            except Exception as error:
                run.doing = f"failed: {error}"
                with contextlib.suppress(OSError, ForebayError):
                    run.log.write("note", self.training.step.taken, {"failed": str(error)})
                if isinstance(error, ForebayError):
                    raise type(error)(f"{error}\n{run.resume_with}") from error
                error.add_note(run.resume_with)
                raise
            finally:
                self.close()
        if not summary["finished"]:
            run.say(f"stopped at step {summary['steps']} of {run.total_steps}; {run.resume_with}")
        return summary

    def _train(self, watchdog: Watchdog) -> None:
        self.training.begin(self.threads)
        left = run_threads(
            self.shell,
            prepare=self.extraction.prepare,
            computes=[self.extract(number) for number in range(len(self.targets))],
            train=lambda: self.training.train(self.release),
            clocks=self.clocks,
            watchdog=watchdog,
            turn=self.turn,
            prefetch_threads=self.config.runtime.prefetch_threads,
            on_start=lambda role: None if role == "prefetch" else use_threads(self.threads),
            say=self.run.say,
        )
        for item in left:
            self.release(item)

    def close(self) -> None:
        for target in self.targets:
            target.close()
        for item in self.shell.items_left():
            self.release(item)
        self.training.close()
        self.run.write_status(self._status, now=True)
        torch.set_num_threads(self.models.cores)
        with contextlib.suppress(RuntimeError, ForebayError):  # the first cause is on its way
            self.training.steps.flush()
        self.run.close()

    def _status(self) -> dict[str, Any]:
        return {
            "step": self.training.step.taken,
            "total_steps": self.run.total_steps,
            "waits": self.clocks.open_waits(),
            "shares": self.clocks.shares(),
            "flow": self.shell.stats(),
            "failures": self.shell.failures[-10:],
        }
