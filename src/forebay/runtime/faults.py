"""Planted faults: the `faults:` section of a run, for tests and for trying what a run does when things break.

Guarantees: whether a fault strikes is decided in one place (`strikes`), from counters alone. A fault strikes `times`
times over all lives of a run: each strike is on disk (`faults.jsonl` in the run's folder) before it acts, so that a run
killed by one and resumed is not killed by it again (two that are alike count together). What strikes is real: the
process gets the signal, the thread sleeps, the states are wrong. The user's token store is never touched: a copy of
it is cut. A run without faults installs no hook and pays nothing. Called by the runtimes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forebay.config import Fault, RunConfig

LOG = "faults.jsonl"
EXIT_CODE = 70  # of a process that a fault of kind `exit` ends
OF_STATES = frozenset({"nan", "zeros", "swap", "repeat", "short"})
NEEDS_ANOTHER_JOB = frozenset({"swap", "repeat"})
ACTS = frozenset({"raise", "hang", "exit", "sigterm", "sigkill", "disk_full", "truncate_shard"})


class PlantedError(Exception):
    """What a fault of kind `raise` raises."""


@dataclass(frozen=True)
class Moment:
    """Where a run is. `step`: optimizer steps taken (of a checkpoint: the step that it holds)."""

    where: str
    step: int
    epoch: int | None = None
    job: int | None = None
    worker: int | None = None
    file: str | None = None


def strikes(fault: Fault, moment: Moment, struck: int) -> bool:
    """Whether `fault`, which has struck `struck` times, strikes now."""
    if fault.place != moment.where or 0 <= fault.times <= struck:
        return False
    pairs = (
        (fault.step, moment.step),
        (fault.epoch, moment.epoch),
        (fault.job, moment.job),
        (fault.worker, moment.worker),
        (fault.file, moment.file),
    )
    return all(wanted is None or wanted == found for wanted, found in pairs)


class Faults:
    """The planted faults of one run; false where there are none."""

    def __init__(self, planted: Sequence[Fault], folder: str | os.PathLike[str], step: Callable[[], int]) -> None:
        self.planted, self._file, self._step = tuple(planted), Path(folder) / LOG, step
        self._lock = threading.Lock()
        self._names = [fault.model_dump_json(exclude_defaults=True) for fault in self.planted]
        self._struck: Counter[str] = Counter()
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        if self.planted and self._file.is_file():
            self._struck.update(line["fault"] for line in struck(folder))

    def __bool__(self) -> bool:
        return bool(self.planted)

    # -- hooks -------------------------------------------------------------------------------------------------------

    def at(self, where: str, **moment: Any) -> None:
        """Raise, hang, die or be signalled here, if that is planted."""
        if self.planted and (fault := self._due(ACTS, where, moment)) is not None:
            self._act(fault)

    def capture(self, inner: Callable[..., np.ndarray], worker: int) -> Callable[..., np.ndarray]:
        """Around a target's capture (host batch, features [T, K * H], last) -> tokens that ran [n]."""
        keeps = any(fault.kind in NEEDS_ANOTHER_JOB for fault in self.planted)
        before: tuple[torch.Tensor, np.ndarray] | None = None

        def capture(batch: Any, features: torch.Tensor, last: torch.Tensor | None = None) -> np.ndarray:
            nonlocal before
            moment = {"epoch": batch.job.epoch, "job": batch.job.id, "worker": worker}
            self.at("extract", **moment)
            echo = inner(batch, features, last)
            possible = OF_STATES if before is not None else OF_STATES - NEEDS_ANOTHER_JOB
            fault = self._due(possible, "extract", moment)
            if fault is not None:
                echo = spoil(fault.kind, features, echo, before)
            elif keeps:
                before = features[: len(echo)].clone(), echo
            return echo

        return capture

    def micro_step(self, inner: Callable[[Any, float], Any]) -> Callable[[Any, float], Any]:
        """Around one item's forward and backward; `nan` makes its gradient that."""

        def micro_step(item: Any, scale: float) -> Any:
            moment = {"epoch": item.batch.job.epoch, "job": item.batch.job.id}
            self.at("train", **moment)
            spoilt = self._due(OF_STATES, "train", moment) is not None
            return inner(item, float("nan") if spoilt else scale)

        return micro_step

    def store(self, config: RunConfig) -> RunConfig:
        """The configuration to read the data with: where a shard is to be cut, of a copy (links but for that shard)."""
        if all(fault.kind != "truncate_shard" for fault in self.planted):
            return config
        self._copy = tempfile.TemporaryDirectory(prefix="forebay-faults-")
        for part in ("train", "heldout"):
            source = Path(config.data.store, part)
            for file in sorted(source.glob("*")):
                target = Path(self._copy.name, part, file.name)
                target.parent.mkdir(exist_ok=True)
                if part == "train" and file.name == "00000.tokens":
                    shutil.copyfile(file, target)
                else:
                    target.symlink_to(file.resolve())
        return config.model_copy(update={"data": config.data.model_copy(update={"store": self._copy.name})})

    # -- deciding and acting -------------------------------------------------------------------------------------------

    def _due(self, kinds: frozenset[str], where: str, about: dict[str, Any]) -> Fault | None:
        moment = Moment(where, **{"step": self._step(), **about})
        with self._lock:
            for name, fault in zip(self._names, self.planted, strict=True):
                if fault.kind in kinds and strikes(fault, moment, self._struck[name]):
                    self._struck[name] += 1
                    self._file.parent.mkdir(parents=True, exist_ok=True)
                    line = {"fault": name, "kind": fault.kind, **vars(moment)}
                    with open(self._file, "a", encoding="utf-8") as file:
                        file.write(json.dumps(line) + "\n")
                    return fault
        return None

    def _act(self, fault: Fault) -> None:
        match fault.kind:
            case "raise":
                raise PlantedError("a planted error (faults: of the configuration)")
            case "hang":
                time.sleep(fault.seconds)
            case "exit":
                os._exit(EXIT_CODE)
            case "sigterm":
                os.kill(os.getpid(), signal.SIGTERM)
            case "sigkill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "disk_full":
                raise OSError(28, "No space left on device")
            case "truncate_shard":
                assert self._copy is not None
                shard = Path(self._copy.name, "train", "00000.tokens")
                os.truncate(shard, shard.stat().st_size // 2)


def spoil(
    kind: str, features: torch.Tensor, echo: np.ndarray, before: tuple[torch.Tensor, np.ndarray] | None
) -> np.ndarray:
    """Make a job's states wrong in place; returns the tokens that seem to have run. `before`: another job's."""
    match kind:
        case "nan":
            features[len(echo) // 2] = float("nan")
        case "zeros":
            features[: len(echo)] = 0
        case "short":
            return echo[:-1]
        case _:
            assert before is not None
            states, ran = before
            features[: len(states)] = states
            return ran if kind == "swap" else echo
    return echo


def struck(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """What has struck a run so far: one entry per strike, with its moment."""
    file = Path(folder) / LOG
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
