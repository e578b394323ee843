"""The two token stores while they are written, and how far they are (OUT/progress.json): a killed run goes on here.

Guarantees: what progress.json names is on disk; it names whole shards only, and the report's counts at the same moment.
Called by `data.prepare` alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from forebay.data.encode import Encoded
from forebay.data.overlap import overlap
from forebay.data.report import Report
from forebay.data.store import StoreWriter, damage, read_manifest, write_json
from forebay.errors import UsageError

SPLITS = ("train", "heldout")
ROWS_AT_ONCE = 2**22  # content hashes compared at a time


class Build:
    """OUT while it is made. `key`: everything that decides the stores' bytes."""

    def __init__(self, folder: Path, key: dict[str, Any], files: list[str]):
        self.folder, self.key = folder, key
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is a file: give a folder for the store")
        known = {"train", "heldout", "report.json", "progress.json"}
        if folder.is_dir() and (others := sorted({p.name for p in folder.iterdir()} - known)):
            raise UsageError(f"{folder} holds other things ({', '.join(others[:3])}): give an empty or new folder")
        self.progress_file = folder / "progress.json"
        self.differs = ""
        state = self._state()
        self.report = Report(files, state.get("report"))
        self._found = state
        self.writers: dict[str, StoreWriter] = {}
        self.starts_shard = True

    def _state(self) -> dict[str, Any]:
        """What an interrupted run of the same key left; with another key its differing fields are noted."""
        try:
            state = json.loads(self.progress_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            state = None
        for found in (state, read_manifest(self.folder / "train")):
            if isinstance(found, dict) and isinstance(found.get("key"), dict) and found["key"] != self.key:
                names = [n for n in {**found["key"], **self.key} if found["key"].get(n) != self.key.get(n)]
                self.differs = ", ".join(f"{n} ({found['key'].get(n)} there, {self.key.get(n)} now)" for n in names)
        if not isinstance(state, dict) or state.get("key") != self.key:
            return {}
        for name in SPLITS:
            if damage(self.folder / name, state["shards"][name], verify=True):
                return {}
        return state

    def finished(self) -> tuple[Report, dict[str, Any]] | None:
        """The counts and report.json of a finished build of the same key."""
        for name in SPLITS:
            manifest = read_manifest(self.folder / name)
            if not manifest or not manifest.get("complete") or manifest.get("key") != self.key:
                return None
            if damage(self.folder / name, manifest["shards"], verify=True):
                return None
        try:
            report = json.loads((self.folder / "report.json").read_text(encoding="utf-8"))
            return Report.of_finished(report), report
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def open(self) -> None:
        """Open the writers, once, and say first what is being made. What an older store held is removed."""
        if self.writers:
            return
        shards = self._found.get("shards", {name: [] for name in SPLITS})
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "report.json").unlink(missing_ok=True)
        for name in SPLITS:
            (self.folder / name / "manifest.json").unlink(missing_ok=True)
            self.writers[name] = StoreWriter(self.folder / name, self.key, shards[name])
        self.save()

    def save(self) -> None:
        shards = {name: writer.shards for name, writer in self.writers.items()}
        write_json(self.progress_file, {"key": self.key, "report": self.report.state(), "shards": shards})

    def close_shards(self) -> None:
        """Make all that was added permanent."""
        for writer in self.writers.values():
            writer.close_shard()
        self.save()
        self.starts_shard = True

    @property
    def open_tokens(self) -> int:
        """Tokens of the longest open shard."""
        return max(writer.open_tokens for writer in self.writers.values())

    @property
    def closed_tokens(self) -> int:
        return sum(shard["tokens"] for writer in self.writers.values() for shard in writer.shards)

    def add(self, chunk: Encoded, heldout: np.ndarray) -> None:
        self.report.add(chunk)
        for name, chosen in (("train", ~heldout), ("heldout", heldout)):
            rows = chunk.rows.select(chosen)
            self.writers[name].append(rows)
            self.report.add_split(name, rows.index)

    def finish(self, facts: dict[str, Any], decode: Callable[[list[int]], str]) -> dict[str, Any]:
        """Complete both stores; `facts` join their manifests. Returns what only the whole can tell."""
        self.close_shards()
        shared = overlap(self.writers["train"].prompts, self.writers["heldout"].prompts, decode)
        compared: dict[str, Any] = {"duplicates": self._duplicates(), "overlap": shared}
        compared["fingerprints"] = {name: writer.finish(facts) for name, writer in self.writers.items()}
        return compared

    def save_report(self, report: dict[str, Any]) -> None:
        """Write report.json; a finished build needs no progress.json any more."""
        write_json(self.folder / "report.json", report)
        if report["stopped"] is None:
            self.progress_file.unlink(missing_ok=True)

    def _duplicates(self) -> int:
        """Rows whose content hash occurred before. Passes over a part of the hashes each bound the memory."""
        parts = 1 + self.report.total("rows") // ROWS_AT_ONCE
        count = 0
        for part in range(parts):
            seen = []
            for writer in self.writers.values():
                for shard in writer.prompts():
                    halves = np.ascontiguousarray(shard.index["id"]).view(np.uint64).reshape(-1, 4)
                    keys = halves[:, 0] ^ (halves[:, 1] * np.uint64(0x9E3779B97F4A7C15))
                    seen.append(keys[keys % np.uint64(parts) == part])
            keys = np.concatenate(seen)
            count += len(keys) - len(np.unique(keys))
        return count

    def close(self) -> None:
        """Close what is open; shards that are not permanent are written anew by the next run."""
        for writer in self.writers.values():
            writer.abort()

    def written_bytes(self) -> int:
        return sum(p.stat().st_size for name in SPLITS for p in (self.folder / name).glob("*") if p.is_file())
