"""What a run is, wherever it runs: its folder, with the lock, configuration, plans, checkpoints, log and status in it.

Guarantees: nothing is written before everything that can be refused has been (`open`); a fresh run never continues into
a folder that holds another; one process per folder. Where it runs is the business of `runtime.local` and
`runtime.ray`, which call this.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forebay import config as configuration
from forebay.config import RunConfig
from forebay.errors import ConfigError, UsageError
from forebay.flow.coordinator import Coordinator, FlowSettings
from forebay.flow.plan import EpochPlan
from forebay.io import checkpoint
from forebay.io.checkpoint import Checkpoints, Snapshot, write_text
from forebay.observe.metrics import MetricsLog
from forebay.observe.trackers import Trackers, check_installed
from forebay.runtime.faults import Faults
from forebay.runtime.preparation import Preparation

STATUS_S = 2.0


class Run:
    """One run, fresh or resumed (`saved`: the checkpoint that it goes on from)."""

    def __init__(self, config: RunConfig, resume: bool, faults: Faults, say: Callable[[str], None]) -> None:
        check_installed(config.loggers)
        self.config, self.faults, self.say = config, faults, say
        self.folder = Path(config.run_dir)
        self.started = time.monotonic()
        self.doing = "starting"  # shown by `forebay status`
        self._status_at = 0.0
        self.checkpoints = Checkpoints(
            self.folder / "checkpoints",
            keep_last=config.checkpoint.keep_last,
            background=config.checkpoint.background,
            report=lambda text: self.say(text),
            before_file=lambda name: faults.at("checkpoint", step=self.checkpoints.writing, file=name),
        )
        self.saved = self._saved(resume)
        self.state: dict[str, Any] = {} if self.saved is None else self.saved.state

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

    # -- opening and closing -----------------------------------------------------------------------------------------

    def open(self, prepared: Preparation) -> None:
        """Make the plans (or find the stored ones), take the folder, write what the run is, decide what remains."""
        self.prepared = prepared
        self.plans = prepared.stored_plans(self.folder / "plans", keep=self.saved is not None)
        self.total_steps = sum(plan.windows for plan in self.plans)
        self._lock()
        try:
            write_text(self.folder / "config.yaml", configuration.dump(self.config))
            (self.folder / "plans").mkdir(exist_ok=True)
            for plan in self.plans:
                plan.save(self.folder / "plans" / f"epoch-{plan.epoch:03d}.plan")
            self.open_log()
            self.coordinator = coordinator_of(self.config, self.plans, self.state.get("flow"))
            for warning in [*self.coordinator.warnings, *prepared.mixing_warnings(self.plans[0])]:
                self.say(f"warning: {warning}")
        except BaseException:
            self._lock_file.close()
            raise

    def open_log(self) -> None:
        """The metrics, cut to what they were at the checkpoint."""
        size = self.state.get("metrics_bytes", 0)
        values, names = self.config.model_dump(mode="json"), self.config.loggers
        trackers = Trackers(names, self.folder, values, lambda text: self.say(text)) if names else None
        self.log = MetricsLog(self.folder / "metrics.jsonl", trackers, size=size)

    def _lock(self) -> None:
        """The lock ends with the process, however it ends."""
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

    def close(self) -> None:
        self.log.close()
        self._lock_file.close()

    # -- looking at it -----------------------------------------------------------------------------------------------

    @property
    def resume_with(self) -> str:
        return f"resume with: forebay train --resume {self.folder}"

    @property
    def wall_s(self) -> float:
        """Seconds of this life and, up to the checkpoint each was resumed from, of those before it."""
        earlier: float = self.state.get("wall_s", 0.0)
        return earlier + time.monotonic() - self.started

    def write_status(self, of: Callable[[], dict[str, Any]], now: bool = False) -> None:
        """What `forebay status` shows; `of()` is asked every few seconds at most, or `now`."""
        if not now and time.monotonic() - self._status_at < STATUS_S:
            return
        self._status_at = time.monotonic()
        status = {"doing": self.doing, "unix_time": time.time(), **of()}
        with contextlib.suppress(OSError):  # a full disk must not end the run from here: the checkpoint says it
            write_text(self.folder / "status.json", json.dumps(status, default=str))


def coordinator_of(config: RunConfig, plans: list[EpochPlan], saved: dict[str, Any] | None) -> Coordinator:
    """What remains to be done, from nothing or from a checkpoint's `flow`."""
    settings = FlowSettings.from_config(config)
    begun = 0 if saved is None else saved["next_epoch"]
    if begun > len(plans):
        raise ConfigError(f"optim.epochs {len(plans)} is below the {begun} epochs that this run has begun")
    coordinator = Coordinator(settings) if saved is None else Coordinator.resume(settings, saved, plans.__getitem__)
    for plan in plans[begun:]:
        coordinator.add_epoch(plan)
    coordinator.no_more_epochs()
    return coordinator
