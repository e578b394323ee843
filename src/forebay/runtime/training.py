"""The training of a run: its steps, and at their boundaries evaluations, checkpoints and what is said of them.

Guarantees: at each step boundary the weights, the optimizer and the ledger are snapshotted together; the best
checkpoint is the one of the highest held-out accept length. Knows of the flow only `TrainingFlow`. Called by the
runtimes, in the process of the first drafter.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any, Protocol

import numpy as np
import torch

from forebay.flow import mixing
from forebay.io.checkpoint import Snapshot, write_text
from forebay.io.drafters import export_drafter
from forebay.models.graph import compilations
from forebay.observe import metrics
from forebay.observe.clock import Clocks
from forebay.observe.console import Steps
from forebay.runtime.assembly import Assembly
from forebay.runtime.evaluation import HeldOut
from forebay.runtime.run import Run
from forebay.runtime.steplog import StepLog
from forebay.runtime.turn import Turn
from forebay.stages.flow import DrafterFlow
from forebay.stages.item import Item
from forebay.stages.train import DrafterStep, Outcome, train_loop


class TrainingFlow(DrafterFlow, Protocol):
    """What the training sees of the flow besides its windows."""

    def snapshot(self) -> dict[str, Any]:
        """The coordinator's state for a checkpoint, taken at a step boundary."""

    def stats(self) -> dict[str, Any]:
        """Counters and gauges of the flow, now."""

    def leases_held(self) -> contextlib.AbstractContextManager[None]:
        """While the drafter itself uses a target (an evaluation) workers may have to wait: no lease expires."""

    @property
    def stopping(self) -> bool:
        """Whether a stop was asked for."""

    @property
    def failures(self) -> list[str]:
        """What went wrong with jobs, newest last."""


def use_threads(count: int) -> None:
    """`count` torch threads in this thread. The value is read once here, because a thread takes the process's latest
    setting at its first parallel operation otherwise."""
    torch.set_num_threads(count)
    torch.get_num_threads()


class Training:
    """See the module's docstring. `train` goes on to the end, or to a stop; `summary` then tells what came of it."""

    def __init__(
        self, run: Run, models: Assembly, flow: TrainingFlow, clocks: Clocks, turn: Turn, in_use: Turn, quiet: bool
    ) -> None:
        """`in_use`: whoever holds it has the first target to itself."""
        self.run, self.models, self.flow, self.clocks, self.turn, self.quiet = run, models, flow, clocks, turn, quiet
        config, state = run.config, run.state
        self.compiled_before = compilations()
        self.clock = clocks.worker("drafter", "drafter 0")
        self.step = DrafterStep(models.replicas, config.optim, run.total_steps)
        if run.saved is not None:
            self.step.restore(run.saved.optimizer, state["steps_taken"])
            self.step.total_steps += state["extra_steps"]
        self.step.clocks = [clocks.worker("drafter", f"drafter {i}") for i in range(1, len(models.replicas))]
        if run.faults:
            for replica in models.replicas:
                replica.micro_step = run.faults.micro_step(replica.micro_step)  # type: ignore[method-assign]
        self.steps = StepLog(
            run.log,
            clocks,
            every=config.runtime.log_every or (1 if config.runtime.drafters[0] == "cpu" else 10),
            total_steps=run.total_steps,
            facts=self._facts,
            token_budget=config.plan.token_budget,
            stats=flow.stats,
            show=self._show,
        )
        self.heldout = HeldOut(models, config.eval, in_use, self.clock, run, state.get("evals", []))

    # -- training ----------------------------------------------------------------------------------------------------

    def begin(self, threads: int) -> None:
        """Before any other thread runs: the evaluation of the untrained drafter, and the compiler."""
        if self.run.config.eval.at_start and not self.heldout.evals:
            self.evaluate("start")
        if self.run.config.runtime.compile:
            torch.set_num_threads(threads)  # what the graph is made for
            self._compile()
        self.clocks.started = time.monotonic()
        self.run.doing = "training"

    def _compile(self) -> None:
        """A step that cannot be compiled is taken eagerly, with a notice."""
        self.run.doing, start, shape = "compiling", time.monotonic(), self.models.prepared.shape
        try:
            made = self.step.compile(shape.token_budget, shape.anchors, shape.slots)
        except Exception as error:  # noqa: BLE001 - compilers fail in many ways, and the run can do without
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            self.run.say(f"runtime.compile: the drafter's step is taken eagerly, it could not be compiled: {reason}")
        else:
            self.run.say(f"the drafter's step is {made} ({time.monotonic() - start:.0f} s)")

    def train(self, release: Any) -> None:
        """Windows until there are no more; then the last evaluation, and the checkpoint. `release` an item's memory."""

        def released(item: Item) -> None:
            if item.last:
                release(item)
            self.flow.release(item.batch.job.epoch, item.batch.job.id)

        with Steps("train", self.run.total_steps, self.step.taken, quiet=self.quiet) as self.bar:
            train_loop(self.flow, self.step, self.turn, self.clock, released, self.after_step)
            if not self.flow.stopping and not self.heldout.measured("end", self.step.taken):
                self.evaluate("end")
            self.checkpoint()
            with self.clock.waiting("checkpoint"):
                self.run.checkpoints.finish()

    def after_step(self, window: Any, outcome: Outcome) -> None:
        step, config = self.step.taken, self.run.config
        self.steps.add(step, window, outcome)
        self.run.checkpoints.check()
        stats = self.flow.stats()
        last = stats["state"] == "CLOSED"
        every = config.eval.every_steps
        ended = every is None and window.epoch not in stats["epochs"]  # evaluated where no interval is set
        evaluated = outcome.finite and not last and bool((every and step % every == 0) or ended)
        if evaluated:
            self.evaluate("step")
        elif outcome.finite and config.eval.guard and step == config.eval.guard_step:
            with self.flow.leases_held():
                self.heldout.guard(step)
        if outcome.finite and not last and (evaluated or step % config.checkpoint.every_steps == 0):
            self.checkpoint()  # what was measured is kept, in case it stays the best

    def _show(self, note: str, steps: int) -> None:
        if self.heldout.evals:
            note += f"  held-out accept length {self.heldout.evals[-1]['accept_length']:.3f}"
        self.bar.advance(note, steps)

    def _facts(self, window: Any) -> dict[str, Any]:
        """What the plan says of a window: see `StepLog`."""
        return self.run.prepared.facts(self.run.plans[window.epoch], window.jobs)

    def evaluate(self, when: str) -> None:
        self.steps.flush()
        before, self.run.doing = self.run.doing, "evaluating"
        self.run.faults.at("eval")
        threads = torch.get_num_threads()
        use_threads(self.models.cores)  # the other role waits
        try:
            with self.flow.leases_held():
                self.heldout.measure(when, self.step.taken)
        finally:
            use_threads(threads)
        self.run.doing = before

    # -- checkpoints, summary ----------------------------------------------------------------------------------------

    def checkpoint(self) -> None:
        self.steps.flush()
        now = [e for e in self.heldout.evals if e["step"] == self.step.taken and e["when"] != "start"]
        with self.clock.waiting("checkpoint"):
            self.run.checkpoints.save(self.snapshot(), now[-1]["accept_length"] if now else None)

    def snapshot(self) -> Snapshot:
        """Weights, optimizer and ledger at this step boundary."""
        models = self.models
        return Snapshot(
            step=self.step.taken,
            drafter={k: v.detach().to("cpu", copy=True).contiguous() for k, v in models.lead.state_dict().items()},
            optimizer=self.step.optimizer_tensors(),
            state={
                "step": self.step.taken,
                "steps_taken": self.step.taken,
                "extra_steps": self.step.total_steps - self.run.total_steps,
                "dtypes": {"target": str(models.target.dtype), "drafter": str(models.dtype)},
                "flow": self.flow.snapshot(),
                "evals": list(self.heldout.evals),
                "metrics_bytes": self.run.log.size,
                "wall_s": self.run.wall_s,
                "spec": models.spec.to_dict(),
                "extras": models.extras,
            },
            contract=models.contract,
        )

    def _mixing(self) -> dict[str, Any]:
        """Of all windows whose steps the weights hold, those of earlier lives of the run too."""
        plans = self.run.plans
        lines = [line for line in metrics.read(self.run.folder / "metrics.jsonl", "step") if line["finite"]]
        edges = plans[0].params.bucket_edges
        jobs = sum(np.bincount(plan.buckets, minlength=len(edges)) for plan in plans)
        return mixing.of_windows([plans[x["epoch"]].buckets[x["jobs"]] for x in lines], jobs.tolist(), edges)

    def close(self) -> None:
        """However the run ended: nothing is left half written. The first cause is on its way; this is the second."""
        self.step.close()
        try:
            self.run.checkpoints.finish()
        except Exception as error:  # noqa: BLE001
            self.run.say(str(error))

    def summary(self) -> dict[str, Any]:
        """Written to summary.json; a finished run's best drafter is exported."""
        stats, shares, run = self.flow.stats(), self.clocks.shares(), self.run
        left = sum(stats["jobs"][state] for state in ("pending", "leased", "ready", "drawn"))
        planned, quarantined = sum(len(plan) for plan in run.plans), stats["jobs_quarantined"]
        measured = sorted((e for e in self.heldout.evals if e["when"] != "start"), key=lambda e: e["accept_length"])
        before = next((e for e in self.heldout.evals if e["when"] == "start"), None)
        summary = {
            "finished": left == 0,
            "run_dir": str(run.folder),
            "steps": self.step.taken,
            "total_steps": max(run.total_steps, self.step.taken),
            "jobs_planned": planned,
            "jobs_committed": planned - left - quarantined,
            "jobs_quarantined": quarantined,
            "accept_length_before": before["accept_length"] if before else None,
            "accept_length_after": measured[-1]["accept_length"] if measured else None,
            "acceptance_by_position": measured[-1]["acceptance_by_position"] if measured else None,
            **{f"{kind}_share": {k: v[f"{kind}_share"] for k, v in shares.items()} for kind in ("busy", "wait")},
            "waits": {k: v["waits"] for k, v in shares.items()},
            "peak_bytes": stats["peak_bytes"],
            "mixing": self._mixing() | {"epochs": stats["mixing"]},
            "failures": self.flow.failures,
            "compilations": compilations() - self.compiled_before,
            "wall_s": round(run.wall_s, 1),
        }
        if summary["finished"]:
            folder, target = run.folder / "drafter", run.config.target
            export_drafter(
                run.folder, folder, step="best", target=target.model, gguf_file=target.gguf_file, overwrite=True
            )
            summary["drafter"] = str(folder)
        write_text(run.folder / "summary.json", json.dumps(summary, indent=1))
        run.doing = "finished" if summary["finished"] else "stopped"
        return summary
