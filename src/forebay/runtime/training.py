"""A training run from its configuration: assemble, run, look in on it, end it.

Guarantees: nothing is written before everything that can be refused has been; a fresh run never continues into a
folder that holds another; a resumed run compares the contract first. At each step boundary the weights, the optimizer
and the ledger are snapshotted together. The best checkpoint is the one of the highest held-out accept length.
Called by `api`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import time
from pathlib import Path
from typing import Any

import torch

from forebay import config as configuration
from forebay.config import RunConfig
from forebay.data.pack import HostBatch, pack_item
from forebay.errors import ConfigError, ForebayError, UsageError
from forebay.flow.coordinator import Coordinator, FlowSettings
from forebay.io import checkpoint
from forebay.io.checkpoint import Checkpoints, Snapshot, write_text
from forebay.io.drafters import export_drafter
from forebay.models.checks import check_states
from forebay.models.graph import compilations
from forebay.observe.clock import Clocks, WorkerClock
from forebay.observe.console import Steps, say
from forebay.observe.metrics import MetricsLog
from forebay.runtime.assembly import Assembly
from forebay.runtime.evaluation import HeldOut
from forebay.runtime.faults import Faults
from forebay.runtime.local import Watchdog, run_local, signals
from forebay.runtime.shell import FlowShell
from forebay.runtime.steplog import StepLog
from forebay.runtime.turn import Turn
from forebay.stages.item import Item, SlotPool, beside
from forebay.stages.train import DrafterStep, Outcome, train_loop

STATUS_S = 2.0


def use_threads(count: int) -> None:
    """`count` torch threads in this thread. The value is read once here, because a thread takes the process's latest
    setting at its first parallel operation otherwise."""
    torch.set_num_threads(count)
    torch.get_num_threads()


class TrainingRun:
    """One run, fresh or resumed. `run()` trains to the end (or to a stop) and returns the summary."""

    def __init__(
        self,
        config: RunConfig,
        *,
        resume: bool = False,
        allow_change: frozenset[str] = frozenset(),
        quiet: bool = False,
    ) -> None:
        self.config, self.quiet = config, quiet
        self.folder = Path(config.run_dir)
        self.started = time.monotonic()
        self.compiled_before = compilations()
        self.say = (lambda text: None) if quiet else say
        self.checkpoints = Checkpoints(
            self.folder / "checkpoints",
            keep_last=config.checkpoint.keep_last,
            background=config.checkpoint.background,
            report=self.say,
            before_file=lambda name: self.faults.at("checkpoint", step=self.checkpoints.writing, file=name),
        )
        self.faults = Faults(config.faults, self.folder, lambda: self.step.taken)
        self.clocks = Clocks()
        self.clock = self.clocks.worker("drafter", "drafter 0")
        self._status_at = 0.0
        self.doing = "starting"  # shown by `forebay status`
        saved = self._saved(resume)
        self.earlier_s = saved.state.get("wall_s", 0.0) if saved is not None else 0.0  # of the lives before this one
        self.models = Assembly(config, saved, self.say, self.faults.store(config), allow_change)
        self.prepared, self.targets, self.target = self.models.prepared, self.models.targets, self.models.target
        self.replicas = self.models.replicas
        self.say(f"memory, at most: {self.models.memory().describe()}")
        self.plans = self.prepared.stored_plans(self.folder / "plans", keep=saved is not None)
        self._lock()
        try:
            self._write_folder(saved)
            self._build_flow(saved)
        except BaseException:
            self._lock_file.close()
            raise

    # -- assembling --------------------------------------------------------------------------------------------------

    def _saved(self, resume: bool) -> Snapshot | None:
        latest = self.checkpoints.latest()
        if not resume:
            if latest is not None:
                raise ConfigError(
                    f"{self.folder} already holds a run ({latest.name}): go on with `forebay train --resume "
                    f"{self.folder}`, or choose another run_dir"
                )
            return None
        if latest is None:
            self.say(f"{self.folder} has no finished checkpoint yet: starting from the beginning")
            return None
        self.say(f"resuming from {latest}")
        return checkpoint.load(latest)

    def _lock(self) -> None:
        """One process per run folder; the lock ends with the process, however it ends."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock_file = open(self.folder / "lock", "w")  # noqa: SIM115 - held until the run is closed
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock_file.close()
            raise UsageError(
                f"another process is training in {self.folder} (`forebay status {self.folder}` shows it): wait for it, "
                "stop it, or choose another run_dir"
            ) from None

    def _write_folder(self, saved: Snapshot | None) -> None:
        write_text(self.folder / "config.yaml", configuration.dump(self.config))
        (self.folder / "plans").mkdir(exist_ok=True)
        for plan in self.plans:
            plan.save(self.folder / "plans" / f"epoch-{plan.epoch:03d}.plan")
        size = saved.state["metrics_bytes"] if saved is not None else 0
        self.log = MetricsLog(self.folder / "metrics.jsonl", self.config.runtime.tensorboard, size=size)

    def _build_flow(self, saved: Snapshot | None) -> None:
        config = self.config
        self.total_steps = sum(plan.windows for plan in self.plans)
        self.step = DrafterStep(self.replicas, config.optim, self.total_steps)
        settings = FlowSettings.from_config(config)
        if saved is None:
            self.coordinator = Coordinator(settings)
            for plan in self.plans:
                self.coordinator.add_epoch(plan)
        else:
            begun = saved.state["flow"]["next_epoch"]
            if begun > len(self.plans):
                raise ConfigError(f"optim.epochs {len(self.plans)} is below the {begun} epochs that this run has begun")
            self.coordinator = Coordinator.resume(settings, saved.state["flow"], self.plans.__getitem__)
            for plan in self.plans[begun:]:
                self.coordinator.add_epoch(plan)
        self.coordinator.no_more_epochs()
        for warning in [*self.coordinator.warnings, *self.prepared.mixing_warnings(self.plans[0])]:
            self.say(f"warning: {warning}")
        if saved is not None:
            self.step.restore(saved.optimizer, saved.state["steps_taken"])
            self.step.total_steps += saved.state["extra_steps"]
        self.step.clocks = [self.clocks.worker("drafter", f"drafter {i}") for i in range(1, len(self.replicas))]
        largest = max(int(plan.nbytes.max()) for plan in self.plans)
        self.pool = SlotPool(
            config.buffer.bytes // largest,
            self.prepared.shape.token_budget,
            self.target.feature_width,
            self.target.facts.hidden_size if config.loss.needs_last_hidden else None,
            self.target.dtype,
            pinned=self.target.device.type == "cuda",
        )
        self.shell = FlowShell(
            self.coordinator,
            on_discard=lambda item: self.pool.release(item.slot),
        )
        same = config.runtime.targets == config.runtime.drafters
        sharing, gpu = config.runtime.device_sharing, self.target.device.type == "cuda"
        if sharing == "auto":  # one thread a role wastes less than two that wait for each other at every product
            sharing = "split" if gpu or self.models.cores > 1 else "alternate"
        self.alternate = sharing == "alternate" and same and len(self.targets) == 1
        self.turn = Turn(self.alternate, self.shell.failed)
        self.in_use = [Turn(True, self.shell.failed) for _ in self.targets]
        evals: list[dict[str, Any]] = saved.state["evals"] if saved is not None else []
        self.steps = StepLog(
            self.log,
            self.clocks,
            every=config.runtime.log_every or (1 if config.runtime.drafters[0] == "cpu" else 10),
            total_steps=self.total_steps,
            supervised=self._supervised,
            stats=self.shell.stats,
            show=self._show,
        )
        self.heldout = HeldOut(self.models, config.eval, self.in_use[0], self.clock, self.log, self.say, evals)

    # -- the stages' work --------------------------------------------------------------------------------------------

    def _prepare_job(self, key: tuple[int, int]) -> HostBatch:
        config, job = self.config, self.plans[key[0]].job(key[1])
        self.prepared.check_intact(job.rows)
        return pack_item(
            self.prepared.train,
            job,
            self.prepared.shape,
            seed=config.seed,
            anchor_rate=config.plan.anchor_rate,
            anchors_per_row=config.plan.anchors_per_row,
            gamma=config.loss.gamma_for(config.drafter.block_size) if config.loss.decay == "exp" else None,
        )

    def _extract(self, number: int) -> Any:
        target, previous = self.targets[number], None
        capture = self.faults.capture(target.capture, number) if self.faults else target.capture
        unseen = WorkerClock("target", f"target {number}")  # its wait for an evaluation counts as busy
        side = beside(target.device)

        def compute(batch: HostBatch) -> Item:
            nonlocal previous
            slot = self.pool.acquire()
            try:
                with self.in_use[number](unseen), torch.cuda.stream(side):
                    echo = capture(batch, slot.features, slot.last_hidden)
                name = f"epoch {batch.job.epoch} job {batch.job.id}"
                width, layers = target.feature_width, len(target.layer_ids)
                previous = check_states(
                    batch, slot.features, echo, width=width, layers=layers, previous=previous, name=name
                )
            except BaseException:
                self.pool.release(slot)
                raise
            return Item(batch, slot)

        return compute

    def _release(self, item: Item) -> None:
        job = item.batch.job
        self.pool.release(item.slot)
        self.shell.release(job.epoch, job.id)

    # -- running -----------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train until every job is committed or a stop is asked for; checkpoint; evaluate; export; summarise."""
        resume_with = f"resume with: forebay train --resume {self.folder}"
        watchdog = Watchdog(
            self.shell,
            self.clocks,
            stall_s=self.config.runtime.stall_s,
            say=self.say,
            stacks=self.folder / "stacks.txt",
            status=self._status,
        )
        with signals(watchdog, self.say):
            try:
                self._train(watchdog)
                summary = self._summary()
            except Exception as error:
                self.doing = f"failed: {error}"
                with contextlib.suppress(OSError, ForebayError):
                    self.log.write("note", self.step.taken, {"failed": str(error)})
                if isinstance(error, ForebayError):
                    raise type(error)(f"{error}\n{resume_with}") from error
                error.add_note(resume_with)
                raise
            finally:
                self._close()
        if not summary["finished"]:
            self.say(f"stopped at step {self.step.taken} of {self.total_steps}; {resume_with}")
        return summary

    def _train(self, watchdog: Watchdog) -> None:
        config = self.config
        threads = self.models.cores if self.alternate else max(1, self.models.cores // 2)
        prepare = self._prepare_job
        if self.faults:
            prepare = self.faults.prepare(prepare)
            for replica in self.replicas:
                replica.micro_step = self.faults.micro_step(replica.micro_step)
        if config.eval.at_start and not self.heldout.evals:
            self._evaluate("start")
        if config.runtime.compile:
            torch.set_num_threads(threads)  # what the graph is made for
            self._compile()
        self.clocks.started = time.monotonic()
        self.doing = "training"

        def train() -> None:
            train_loop(self.shell, self.step, self.turn, self.clock, self._release, self._after_step)
            if (
                self.coordinator.closed
                and not self.shell.stopping
                and not self.heldout.measured("end", self.step.taken)
            ):
                self._evaluate("end")
            self._checkpoint()
            with self.clock.waiting("checkpoint"):
                self.checkpoints.finish()

        with Steps("train", self.total_steps, self.step.taken, quiet=self.quiet) as self.bar:
            left = run_local(
                self.shell,
                prepare=prepare,
                computes=[self._extract(i) for i in range(len(self.targets))],
                train=train,
                clocks=self.clocks,
                watchdog=watchdog,
                turn=self.turn,
                prefetch_threads=config.runtime.prefetch_threads,
                on_start=lambda role: None if role == "prefetch" else use_threads(threads),
                say=self.say,
            )
        for item in left:
            self.pool.release(item.slot)

    def _compile(self) -> None:
        """Before any other thread runs. A step that cannot be compiled is taken eagerly, with a notice."""
        self.doing, start, shape = "compiling", time.monotonic(), self.prepared.shape
        try:
            made = self.step.compile(shape.token_budget, shape.anchors, shape.slots)
        except Exception as error:  # noqa: BLE001 - compilers fail in many ways, and the run can do without
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            self.say(f"runtime.compile: the drafter's step is taken eagerly, it could not be compiled: {reason}")
        else:
            self.say(f"the drafter's step is {made} ({time.monotonic() - start:.0f} s)")

    def _close(self) -> None:
        """However the run ended: nothing is left running, open or half written."""
        self.step.close()
        for target in self.targets:
            target.close()
        for item in self.shell.items_left():
            self.pool.release(item.slot)
        try:
            self.checkpoints.finish()
        except Exception as error:  # noqa: BLE001 - the first cause is on its way; this is the second
            self.say(str(error))
        self._status(now=True)
        torch.set_num_threads(self.models.cores)
        with contextlib.suppress(RuntimeError, ForebayError):  # as above
            self.steps.flush()
        self.log.close()
        self._lock_file.close()

    def _after_step(self, window: Any, outcome: Outcome) -> None:
        step, config = self.step.taken, self.config
        self.steps.add(step, window, outcome)
        self.checkpoints.check()
        last = self.coordinator.closed
        every = config.eval.every_steps
        evaluated = outcome.finite and not last and ((every and step % every == 0) or self._epoch_ended(window))
        if evaluated:
            self._evaluate("step")
        elif outcome.finite and config.eval.guard and step == config.eval.guard_step:
            with self.shell.leases_held():
                self.heldout.guard(step)
        if outcome.finite and not last and (evaluated or step % config.checkpoint.every_steps == 0):
            self._checkpoint()  # what was measured is kept, in case it stays the best

    def _show(self, note: str, steps: int) -> None:
        if self.heldout.evals:
            note += f"  held-out accept length {self.heldout.evals[-1]['accept_length']:.3f}"
        self.bar.advance(note, steps)

    def _supervised(self, window: Any) -> int:
        plan, counts = self.plans[window.epoch], self.prepared.train.supervised
        return sum(int(counts[list(plan.job(job).rows)].sum()) for job in window.jobs)

    def _epoch_ended(self, window: Any) -> bool:
        """Whether this window was the last of its epoch (evaluated there where no interval is set)."""
        return self.config.eval.every_steps is None and window.epoch not in self.shell.stats()["epochs"]

    def _evaluate(self, when: str) -> None:
        self.steps.flush()
        before, self.doing = self.doing, "evaluating"
        self.faults.at("eval")
        threads = torch.get_num_threads()
        use_threads(self.models.cores)  # the other role waits
        try:
            with self.shell.leases_held():
                self.heldout.measure(when, self.step.taken)
        finally:
            use_threads(threads)
        self.doing = before

    # -- checkpoints, status, summary --------------------------------------------------------------------------------

    def _checkpoint(self) -> None:
        self.steps.flush()
        now = [e for e in self.heldout.evals if e["step"] == self.step.taken and e["when"] != "start"]
        with self.clock.waiting("checkpoint"):
            self.checkpoints.save(self.snapshot(), now[-1]["accept_length"] if now else None)

    def snapshot(self) -> Snapshot:
        """Weights, optimizer and ledger at this step boundary."""
        module = self.replicas[0].module
        return Snapshot(
            step=self.step.taken,
            drafter={k: v.detach().to("cpu", copy=True).contiguous() for k, v in module.state_dict().items()},
            optimizer=self.step.optimizer_tensors(),
            state={
                "step": self.step.taken,
                "steps_taken": self.step.taken,
                "extra_steps": self.step.total_steps - self.total_steps,
                "dtypes": {"target": str(self.target.dtype), "drafter": str(self.models.dtype)},
                "flow": self.shell.snapshot(),
                "evals": list(self.heldout.evals),
                "metrics_bytes": self.log.size,
                "wall_s": self._wall_s(),
                "spec": self.models.spec.to_dict(),
                "extras": self.models.extras,
            },
            contract=self.models.contract,
        )

    def _status(self, now: bool = False) -> None:
        if not now and time.monotonic() - self._status_at < STATUS_S:
            return
        self._status_at = time.monotonic()
        status = {
            "doing": self.doing,
            "step": self.step.taken,
            "total_steps": self.total_steps,
            "unix_time": time.time(),
            "waits": self.clocks.open_waits(),
            "shares": self.clocks.shares(),
            "flow": self.shell.stats(),
            "failures": self.shell.failures[-10:],
        }
        with contextlib.suppress(OSError):  # a full disk must not end the run from here: the checkpoint says it
            write_text(self.folder / "status.json", json.dumps(status, default=str))

    def _wall_s(self) -> float:
        """Seconds of this life and, up to the checkpoint each was resumed from, of those before it."""
        return self.earlier_s + time.monotonic() - self.started

    def _summary(self) -> dict[str, Any]:
        stats = self.shell.stats()
        shares = self.clocks.shares()
        left = sum(stats["jobs"][state] for state in ("pending", "leased", "ready", "drawn"))
        quarantined = sum(len(jobs) for jobs in self.coordinator.quarantined.values())
        planned = sum(len(plan) for plan in self.plans)
        finished = left == 0
        measured = sorted((e for e in self.heldout.evals if e["when"] != "start"), key=lambda e: e["accept_length"])
        before = next((e for e in self.heldout.evals if e["when"] == "start"), None)
        summary = {
            "finished": finished,
            "run_dir": str(self.folder),
            "steps": self.step.taken,
            "total_steps": self.total_steps,
            "jobs_planned": planned,
            "jobs_committed": planned - left - quarantined,
            "jobs_quarantined": quarantined,
            "accept_length_before": before["accept_length"] if before else None,
            "accept_length_after": measured[-1]["accept_length"] if measured else None,
            "acceptance_by_position": measured[-1]["acceptance_by_position"] if measured else None,
            "busy_share": {k: v["busy_share"] for k, v in shares.items()},
            "wait_share": {k: v["wait_share"] for k, v in shares.items()},
            "waits": {k: v["waits"] for k, v in shares.items()},
            "peak_bytes": stats["peak_bytes"],
            "mixing": stats["mixing"],
            "failures": self.shell.failures,
            "compilations": compilations() - self.compiled_before,
            "wall_s": round(self._wall_s(), 1),
        }
        if finished:
            folder = self.folder / "drafter"
            target = self.config.target
            export_drafter(
                self.folder, folder, step="best", target=target.model, gguf_file=target.gguf_file, overwrite=True
            )
            summary["drafter"] = str(folder)
        write_text(self.folder / "summary.json", json.dumps(summary, indent=1))
        self.doing = "finished" if finished else "stopped"
        return summary
