"""Checkpoints: a directory that is either whole or ignored.

Guarantees: files are written under a temporary name, fsynced, the directory renamed, its DONE marker written last; a
kill at any instant leaves the previous checkpoint loadable. Tensors are safetensors, the rest JSON: nothing is
unpickled on load. `keep_last` newest and the best (by held-out accept length, never by loss) are kept. With
`background` a thread writes while training goes on, at most one checkpoint at a time; tensors are the snapshot's own
copies and the rest is JSON text before `save` returns, so that what is written is the step boundary. Its error is
raised at the next `save`, `check` or `finish`. Called by `api` and the training loop's hooks.

Layout of `step-00000123/`: `drafter.safetensors` (fp32 masters, zlab names), `optimizer.safetensors`
(`exp_avg.NAME`, `exp_avg_sq.NAME`), `state.json` (step, flow, metrics, ...), `contract.json`, `DONE` (step and accept
length). `best.json` beside them is for readers; the best is found from the markers.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from forebay.errors import ContractError, ForebayError

MARKER = "DONE"


@dataclass(frozen=True)
class Snapshot:
    """Everything a run needs to go on, as of one step boundary. Tensors are this object's own copies, on the CPU."""

    step: int
    drafter: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    state: dict[str, Any]
    contract: dict[str, Any]


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write and fsync a small file under a temporary name, then rename it: whole or absent."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync_directory(path.parent)


def _save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file(tensors, str(path))
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def contract_differences(
    saved: dict[str, Any], current: dict[str, Any], allow: frozenset[str] = frozenset()
) -> list[str]:
    """One line per differing field, `field: saved X, now Y`; fields at or under a name in `allow` are passed over."""
    lines = []
    for key in sorted(saved.keys() | current.keys()):
        if any(key == name or key.startswith(name + ".") for name in allow):
            continue
        old, new = saved.get(key, "(absent)"), current.get(key, "(absent)")
        if json.loads(json.dumps(old)) != json.loads(json.dumps(new)):
            lines.append(f"{key}: saved {old}, now {new}")
    return lines


def check_contract(saved: dict[str, Any], current: dict[str, Any], allow: frozenset[str] = frozenset()) -> None:
    """Raise ContractError listing every differing field."""
    lines = contract_differences(saved, current, allow)
    if lines:
        raise ContractError(
            "the checkpoint was made under another contract:\n  "
            + "\n  ".join(lines)
            + "\nresume with what it was made with, or allow an intended change with --allow-change FIELD"
        )


class Checkpoints:
    """The checkpoints of one run, under `folder`."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep_last: int = 2,
        background: bool = True,
        report: Callable[[str], None] = lambda text: None,
        before_file: Callable[[str], None] = lambda name: None,
    ) -> None:
        """`before_file` is called with each file's name before it is written: where faults are planted."""
        self.folder = Path(folder)
        self._keep_last, self._background = keep_last, background
        self._report, self._before_file = report, before_file
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.writing: int | None = None  # the step whose checkpoint is being written
        self.best: tuple[int, float] | None = None  # (step, held-out accept length)

    # -- writing -----------------------------------------------------------------------------------------------------

    def save(self, snapshot: Snapshot, accept_length: float | None = None) -> None:
        """Write `snapshot`; waits only for a save still in flight. Raises the error of the previous background save."""
        self.finish()
        self.folder.mkdir(parents=True, exist_ok=True)
        if accept_length is not None and (self.best is None or accept_length > self.best[1]):
            self.best = (snapshot.step, accept_length)
        texts = {
            "state.json": json.dumps(snapshot.state),
            "contract.json": json.dumps(snapshot.contract, indent=1),
            MARKER: json.dumps({"step": snapshot.step, "accept_length": accept_length}) + "\n",
        }
        self.writing = snapshot.step
        if not self._background:
            self._write(snapshot, texts)
            return
        self._thread = threading.Thread(target=self._write_kept, args=(snapshot, texts), name="checkpoint", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error of the background save, if it has failed by now."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def finish(self) -> None:
        """Wait for the save in flight; raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _write_kept(self, snapshot: Snapshot, texts: dict[str, str]) -> None:
        try:
            self._write(snapshot, texts)
        except Exception as error:  # noqa: BLE001 - raised again by check(), in the training thread
            self._error = error

    def _write(self, snapshot: Snapshot, texts: dict[str, str]) -> None:
        try:
            self._write_files(snapshot, texts)
        finally:
            self.writing = None

    def _write_files(self, snapshot: Snapshot, texts: dict[str, str]) -> None:
        name = f"step-{snapshot.step:08d}"
        temporary = self.folder / f".tmp-{name}"
        final = self.folder / name
        if (final / MARKER).exists() and (final / MARKER).read_text(encoding="utf-8") == texts[MARKER]:
            return  # a run resumed at this step and stopped again before the next
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            self._before_file("drafter.safetensors")
            _save_tensors(snapshot.drafter, temporary / "drafter.safetensors")
            self._before_file("optimizer.safetensors")
            _save_tensors(snapshot.optimizer, temporary / "optimizer.safetensors")
            self._before_file("state.json")
            write_text(temporary / "state.json", texts["state.json"])
            write_text(temporary / "contract.json", texts["contract.json"])
            _sync_directory(temporary)
            if final.exists():  # left unfinished by a kill before the marker, or measured only now
                (final / MARKER).unlink(missing_ok=True)
                shutil.rmtree(final)
            self._before_file("rename")
            os.rename(temporary, final)
            _sync_directory(self.folder)
            self._before_file(MARKER)
            write_text(final / MARKER, texts[MARKER])
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if error.errno in (28, 122):  # ENOSPC, EDQUOT
                raise ForebayError(
                    f"disk full at {self.folder} while saving {name}: the previous checkpoint is whole; free space "
                    f"(one checkpoint takes {self._bytes(snapshot) / 2**20:.0f} MiB) and resume"
                ) from None
            raise
        if self.best is not None:
            write_text(self.folder / "best.json", json.dumps({"step": self.best[0], "accept_length": self.best[1]}))
        self._report(f"checkpoint {final} ({self._bytes(snapshot) / 2**20:.1f} MiB)")
        self._prune()

    @staticmethod
    def _bytes(snapshot: Snapshot) -> int:
        return sum(
            t.numel() * t.element_size() for part in (snapshot.drafter, snapshot.optimizer) for t in part.values()
        )

    def _prune(self) -> None:
        whole = self.whole()
        for path in [*self.folder.glob("step-*"), *self.folder.glob(".tmp-step-*")]:
            if path not in whole:  # a kill's remains: nothing else is written now
                shutil.rmtree(path)
        keep = set(whole[-self._keep_last :])
        for path in whole:
            step = int(path.name.removeprefix("step-"))
            if path not in keep and not (self.best is not None and step == self.best[0]):
                # the marker goes first, so that a kill in between leaves no half checkpoint that looks whole
                (path / MARKER).unlink()
                shutil.rmtree(path)

    # -- reading -----------------------------------------------------------------------------------------------------

    def whole(self) -> list[Path]:
        """Finished checkpoints, oldest first."""
        return finished(self.folder)

    def latest(self) -> Path | None:
        """The newest finished checkpoint; unfinished ones are named and passed over."""
        whole = self.whole()
        for path in sorted([*self.folder.glob("step-*"), *self.folder.glob(".tmp-step-*")]):
            if path not in whole:
                self._report(f"ignoring the unfinished checkpoint {path.name}")
        self.best = None
        for path in whole:
            done = _done(path)
            assert done is not None
            accept_length = done["accept_length"]
            if accept_length is not None and (self.best is None or accept_length > self.best[1]):
                self.best = (int(done["step"]), float(accept_length))
        return whole[-1] if whole else None


def _done(folder: Path) -> dict[str, Any] | None:
    """What the marker of a finished checkpoint says; None where it is missing, or was not written whole."""
    try:
        said = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return said if isinstance(said, dict) and said.keys() >= {"step", "accept_length"} else None


def finished(folder: Path) -> list[Path]:
    """The finished checkpoints in `folder`, oldest first. Their files are not read."""
    return sorted(p for p in folder.glob("step-*") if _done(p) is not None)


def load(path: str | os.PathLike[str]) -> Snapshot:
    """Read a finished checkpoint. Raises ForebayError if it is unfinished, pickled or damaged.

    The error of a damaged one names the newest sound one beside it and the command that goes on from there.
    """
    folder = Path(path)
    if not (folder / MARKER).is_file():
        pickled = [p.name for p in folder.glob("*") if p.suffix in {".bin", ".pt", ".pth", ".ckpt", ".pkl"}]
        why = f"it holds pickled files ({', '.join(pickled)}), which are never loaded" if pickled else "it has no DONE"
        raise ForebayError(f"{folder} is no finished checkpoint: {why}")
    try:
        return _read(folder)
    except DAMAGE as error:
        raise ForebayError(f"checkpoint {folder} is damaged ({error}): {_way_on(folder)}") from None


#: What reading a damaged checkpoint raises.
DAMAGE = (OSError, ValueError, KeyError, TypeError, SafetensorError)


def _read(folder: Path) -> Snapshot:
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    return Snapshot(
        step=int(state["step"]),
        drafter=load_file(str(folder / "drafter.safetensors")),
        optimizer=load_file(str(folder / "optimizer.safetensors")),
        state=state,
        contract=json.loads((folder / "contract.json").read_text(encoding="utf-8")),
    )


def _way_on(damaged: Path) -> str:
    """The newest sound checkpoint of the run whose checkpoint `damaged` is, and how to go on from it."""
    run, sound, newer = damaged.resolve().parent.parent, None, []
    for path in reversed(finished(damaged.resolve().parent)):
        try:
            _read(path)
        except DAMAGE:
            newer.append(path)  # damaged, or newer than any sound one
        else:
            sound = path
            break
    remove = f"rm -r {shlex.join(map(str, newer))} && " if newer else ""
    resume = f"{remove}forebay train --resume {shlex.quote(str(run))}"
    if sound is None:
        return f"no other checkpoint of the run is sound; start it from the beginning with\n  {resume}"
    step = int(sound.name.removeprefix("step-"))
    return f"the newest sound one is {sound.name}; go on from it with\n  {resume}\nor export it with --step {step}"
