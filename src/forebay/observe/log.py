"""A run's `metrics.jsonl` read as columns, while it is written or long after.

Guarantees: never waits for the run nor takes its lock; half a last line is left for the next look; a log that was cut
or replaced (the run was resumed or started anew) is read again from its first byte; a damaged line is left out and
counted. Knows no metric by name but `kind`, `step`, `t`, `epoch` and `jobs`: what a line has is a column. Called by
`observe.history` and `observe.watch`.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

NAN = float("nan")
MARK = 256  # bytes before the place read so far, by which a replaced file is known


class Log:
    """Columns of the step lines; the other lines as they are, by kind (`others["eval"]`)."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._forget()

    def _forget(self) -> None:
        self._at, self._mark = 0, b""
        self._columns: dict[str, array[float]] = {}
        self.length = 0
        self.jobs: list[list[int]] = []
        self.others: dict[str, list[dict[str, Any]]] = {}
        self.damaged: list[int] = []  # numbers of lines, the first is 1
        self.lines = 0
        self.cut_at_end = False

    def read(self) -> bool:
        """Read what is new; whether there was any (a log that began anew is new)."""
        try:
            file = open(self.path, "rb")  # noqa: SIM115 - closed below
        except FileNotFoundError:
            return False
        with file:
            fresh = self._replaced(file)
            if fresh:
                self._forget()
            file.seek(self._at)
            content = file.read()
        end = content.rfind(b"\n") + 1
        self.cut_at_end = end < len(content)
        for text in content[:end].split(b"\n")[:-1]:
            self._take(text)
        self._at += end
        self._mark = (self._mark + content[max(0, end - MARK) : end])[-MARK:]
        return fresh or end > 0

    def _replaced(self, file: Any) -> bool:
        if os.fstat(file.fileno()).st_size < self._at:
            return True
        file.seek(self._at - len(self._mark))
        return bool(file.read(len(self._mark)) != self._mark)

    def _take(self, text: bytes) -> None:
        self.lines += 1
        try:
            line = json.loads(text)
            kind, step = line["kind"], float(line["step"])
        except (ValueError, KeyError, TypeError):
            self.damaged.append(self.lines)
            return
        if kind != "step":
            self.others.setdefault(str(kind), []).append(line)
            return
        jobs = line.pop("jobs", None)
        self.jobs.append(jobs if isinstance(jobs, list) else [])
        line["step"] = step
        for name, value in flat(line):
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = array("d", [NAN]) * self.length
            elif len(column) < self.length:
                column.extend([NAN] * (self.length - len(column)))
            column.append(value)
        self.length += 1

    @property
    def names(self) -> list[str]:
        """Of the columns, in the order in which they came up."""
        return list(self._columns)

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def column(self, name: str) -> Floats:
        """[lines of kind `step`]; NaN where a line does not have it."""
        out = np.full(self.length, np.nan)
        found = self._columns.get(name)
        if found is not None:
            out[: len(found)] = found
        return out


def flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every number in nested mappings and lists, under its dotted name; truth is 1 or 0, text is passed over."""
    for name, value in values.items():
        if isinstance(value, bool | int | float):
            yield prefix + name, float(value)
        elif isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            yield from flat({str(i): x for i, x in enumerate(value)}, f"{prefix}{name}.")
