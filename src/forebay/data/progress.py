"""Progress of long work: a bar on a terminal, else a plain line every 10 s, with the rate and the time left.

Called by `data.prepare` and `stages.regenerate`. `total` counts what decides the time left (rows, or bytes of input).
"""

from __future__ import annotations

import time
from collections.abc import Callable

SAY_EVERY_S = 10.0


class Progress:
    """Use as a context manager. Work that was found done (`known`) does not enter the rate."""

    def __init__(self, name: str, total: int, enabled: bool = True, *, clock: Callable[[], float] = time.monotonic):
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn
        from rich.progress import Progress as Bar

        self.name, self.total, self.enabled, self._clock = name, max(total, 1), enabled, clock
        self.done = self.known = 0
        self._started = self._said = clock()
        self._console = Console(stderr=True)
        columns = (TextColumn(name), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[said]}"))
        self._bar = Bar(*columns, console=self._console) if enabled and self._console.is_terminal else None
        self._task = self._bar.add_task(name, total=self.total, said="") if self._bar else None

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, done: int, counts: dict[str, float], *, known: int | None = None) -> None:
        """`done` of the total so far; `counts` are shown with their rates, e.g. {"rows": 120}."""
        self.done = done
        self.known = known if known is not None else self.known
        now = self._clock()
        seconds = max(now - self._started, 1e-6)
        rate = (done - self.known) / seconds
        left = f"{(self.total - done) / rate:,.0f} s left" if rate > 0 else "time left unknown"
        said = ", ".join(f"{n:,.0f} {name} ({n / seconds:,.0f}/s)" for name, n in counts.items()) + f", {left}"
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=done, said=said)
        elif self.enabled and now - self._said >= SAY_EVERY_S:
            self._said = now
            self._console.print(f"{self.name}: {done / self.total:.0%}, {said}", highlight=False)
