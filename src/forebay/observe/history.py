"""A run's folder as one structure: its log, plans, configuration, summary, status, data report and environment.

Guarantees: reads only, and copes with what an older run does not have (`remarks` says what is missing or damaged); a
folder that holds no run, or one of a newer format, is refused by name. Called by `observe.figures`, `observe.report`,
`observe.watch` and `api`.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from forebay import __version__
from forebay.errors import DataError, ForebayError, UsageError
from forebay.flow.jobs import EpochPlan
from forebay.observe.log import Floats, Log

FORMAT = 1  # of a run's folder, in its run.json; a run without that file is older
RUN_FILE = "run.json"


@dataclass
class History:
    """What a run's folder says. `refresh` reads on."""

    folder: Path
    log: Log
    config: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)  # run.json: format, versions, machine
    data: dict[str, Any] = field(default_factory=dict)  # the store's report.json
    plans: dict[int, EpochPlan] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, run_dir: str | os.PathLike[str]) -> History:
        """Raises UsageError where there is no run, DataError where a newer forebay wrote it."""
        folder = Path(run_dir)
        if not (folder / "config.yaml").is_file():
            raise UsageError(f"{run_dir} holds no run (no config.yaml): give the run_dir of a run that was started")
        about = _json(folder / RUN_FILE)
        if about.get("format", FORMAT) > FORMAT:
            raise DataError(
                f"{run_dir} is of format {about['format']} (forebay {about.get('forebay', 'unknown')}) and forebay "
                f"{__version__} reads up to {FORMAT}: update forebay"
            )
        try:
            config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError):
            config = None
        if not isinstance(config, dict):
            raise DataError(f"{folder / 'config.yaml'} is damaged: it holds no configuration")
        out = cls(folder, Log(folder / "metrics.jsonl"), config, about)
        out.data = out._store_report()
        out.refresh()
        return out

    def refresh(self) -> bool:
        """Read what was written since; whether there was anything."""
        status = _json(self.folder / "status.json")
        new = self.log.read() or status != self.status
        self.status, self.summary = status, _json(self.folder / "summary.json")
        self.remarks = [*self._read_plans(), *self._remarks()]
        return new

    def _store_report(self) -> dict[str, Any]:
        store = Path(str(self.config.get("data", {}).get("store", "")))
        for place in (store, *(parent / store for parent in self.folder.resolve().parents)):
            if found := _json(place / "report.json"):
                return found
        return {}

    def _read_plans(self) -> list[str]:
        faults = []
        for file in sorted((self.folder / "plans").glob("epoch-*.plan")):
            epoch = int(file.stem.rpartition("-")[2])
            if epoch not in self.plans:
                try:
                    self.plans[epoch] = EpochPlan.load(file)
                except ForebayError as error:
                    faults.append(str(error))
        return faults

    def _remarks(self) -> list[str]:
        log, name, out = self.log, self.log.path.name, []
        if not log.lines:
            out.append(f"no step has been logged yet ({name} is {'empty' if log.path.exists() else 'missing'})")
        if log.cut_at_end:
            out.append(f"the last line of {name} is cut (still being written, or the run was killed): left out")
        for number in log.damaged[:3]:
            out.append(f"line {number} of {name} is damaged and left out")
        if len(log.damaged) > 3:
            out.append(f"{len(log.damaged)} lines of {name} are damaged and left out")
        return out

    # -- what is asked of it --------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def evals(self) -> list[dict[str, Any]]:
        """Held-out measurements by the serving loop, oldest first."""
        return [e for e in self.log.others.get("eval", []) if isinstance(e.get("accept_length"), int | float)]

    @property
    def seconds(self) -> Floats:
        """[steps] since the first start, without the time between lives: a resumed run's clock begins anew."""
        t = self.log.column("t")
        back = np.flatnonzero(np.diff(t) < 0)
        for place in back:
            t[place + 1 :] += t[place]
        return t

    def bucket_counts(self) -> tuple[np.ndarray, np.ndarray]:
        """(counts [steps, buckets] of each window's items, shares [buckets] of all planned jobs)."""
        if not self.plans:
            return np.zeros((0, 0)), np.zeros(0)
        kinds = len(self.bucket_edges)
        counts = np.zeros((self.log.length, kinds))
        epochs = self.log.column("epoch")
        for place, jobs in enumerate(self.log.jobs):
            plan = self.plans.get(int(epochs[place])) if epochs[place] == epochs[place] else None
            for job in jobs if plan is not None else ():
                counts[place, plan.buckets[job]] += 1  # type: ignore[union-attr]
        corpus = sum(np.bincount(plan.buckets, minlength=kinds) for plan in self.plans.values())
        return counts, corpus / max(1, int(np.sum(corpus)))

    @property
    def bucket_edges(self) -> tuple[int, ...]:
        return next(iter(self.plans.values())).params.bucket_edges if self.plans else ()

    @property
    def total_steps(self) -> int | None:
        total = self.status.get("total_steps") or self.summary.get("total_steps")
        return int(total) if total else None


def _json(file: Path) -> dict[str, Any]:
    """The mapping in a JSON file; empty where the file is missing or no mapping."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
