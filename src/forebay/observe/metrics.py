"""Metrics of a run: one JSON object a line in `metrics.jsonl`, and TensorBoard where asked for and installed.

Guarantees: every line carries its kind (`step`, `eval`, `note`), the optimizer step and seconds since the start; a
line is written whole or not at all (a cut last line from a kill is mended when the run resumes). Called by
`runtime.training`.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


class MetricsLog:
    """Appends metric lines to one file."""

    def __init__(self, path: str | os.PathLike[str], tensorboard: bool = False) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._mend()
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()
        self._start = time.monotonic()
        self._board: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                from forebay.errors import ConfigError

                raise ConfigError(
                    "observe.tensorboard needs the package tensorboard: pip install tensorboard"
                ) from None
            self._board = SummaryWriter(str(self.path.parent / "tensorboard"))

    def _mend(self) -> None:
        data = self.path.read_bytes()
        if data and not data.endswith(b"\n"):
            with open(self.path, "r+b") as file:
                file.truncate(data.rfind(b"\n") + 1)

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        line = {"kind": kind, "step": step, "t": round(time.monotonic() - self._start, 3), **values}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


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
