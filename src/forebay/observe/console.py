"""What a person sees while a run goes on: plain sentences, and one live line of progress.

Guarantees: on a terminal a bar with rate and ETA; elsewhere a line every ten seconds, so that a log file stays
readable. Called by `api`, `cli` and `runtime.training`.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

console = Console(stderr=True, highlight=False)
LINE_S = 10.0


def say(text: str) -> None:
    """One plain sentence on stderr (stdout is kept for results)."""
    console.print(text, markup=False)


def table(title: str, columns: list[str], rows: list[list[Any]]) -> None:
    """A small table on stderr."""
    out = Table(title=title, title_justify="left")
    for number, name in enumerate(columns):
        out.add_column(name, justify="left" if number == 0 else "right")
    for row in rows:
        out.add_row(*[str(cell) for cell in row])
    console.print(out)


class Steps:
    """Progress over a known number of steps: `with Steps("train", 400) as bar: bar.advance("loss 3.2")`."""

    def __init__(self, what: str, total: int, done: int = 0, quiet: bool = False) -> None:
        self._what, self._total, self._done, self._quiet = what, total, done, quiet
        self._start = self._said = time.monotonic()
        self._first = done
        self._bar: Progress | None = None
        if console.is_terminal and not quiet:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TextColumn("{task.fields[note]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task(what, total=total, completed=done, note="")

    def __enter__(self) -> Steps:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, note: str = "", steps: int = 1) -> None:
        self._done += steps
        if self._bar is not None:
            self._bar.update(self._task, advance=steps, note=note)
            return
        now = time.monotonic()
        if not self._quiet and (now - self._said >= LINE_S or self._done >= self._total):
            self._said = now
            rate = (self._done - self._first) / max(1e-9, now - self._start)
            left = (self._total - self._done) / max(rate, 1e-9)
            print(
                f"{self._what} {self._done}/{self._total}  {note}  {rate:.2f}/s  about {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )
