"""Metrics of a run: one JSON object a line in `metrics.jsonl`, and the same to trackers; fields: `observe.schema`.

Guarantees: every line carries its kind (`step`, `eval`, `note`), the optimizer step and seconds since the start. The
file is the history of the weights: a resumed run cuts it to the size it had at the checkpoint, so that no step is in it
twice; what is cut (steps that are taken again, notes of failures) goes to the end of `metrics-cut.jsonl`. Called by
`runtime.training`.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from forebay.errors import ForebayError
from forebay.observe.trackers import Trackers


class MetricsLog:
    """Appends metric lines to one file."""

    def __init__(self, path: str | os.PathLike[str], trackers: Trackers | None = None, size: int = 0) -> None:
        """`trackers` get every line too. `size`: what the file had (`self.size`) when the checkpoint was taken that the
        run goes on from."""
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._cut(size)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()
        self._start = time.monotonic()
        self._trackers = trackers

    def _cut(self, size: int) -> None:
        with open(self.path, "r+b") as file:
            file.seek(size)
            rest = file.read()
            whole = rest[: rest.rfind(b"\n") + 1]  # a kill may have left half a line
            if whole:
                with open(self.path.with_name("metrics-cut.jsonl"), "ab") as cut:
                    cut.write(whole)
            if rest:
                file.truncate(size)

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return os.fstat(self._file.fileno()).st_size

    @property
    def seconds(self) -> float:
        """Since the start."""
        return round(time.monotonic() - self._start, 3)

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        line = {"kind": kind, "step": step, "t": self.seconds, **values}
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise ForebayError(f"{self.path} cannot be written ({error.strerror}): free space and resume") from None
        if self._trackers is not None:
            self._trackers.write(kind, step, values)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: what is buffered belongs to a step that is taken again
            self._file.close()
        if self._trackers is not None:
            self._trackers.close()


def read(path: str | os.PathLike[str], kind: str | None = None) -> list[dict[str, Any]]:
    """The lines of a metrics file, all or of one kind; a cut last line is passed over."""
    out = []
    with open(path, encoding="utf-8") as file:
        for text in file:
            if text.endswith("\n"):
                line = json.loads(text)
                if kind is None or line["kind"] == kind:
                    out.append(line)
    return out
