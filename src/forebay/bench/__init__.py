"""What `forebay bench` runs: one module per subject, each with `main(argv)` that measures, prints and returns."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

SUBJECTS = ("flow", "mixing", "designs", "drafter", "target", "pipeline")


def main(subject: str, argv: Sequence[str]) -> None:
    """Run `bench.SUBJECT.main(argv)`."""
    assert subject in SUBJECTS, subject
    importlib.import_module(f"forebay.bench.{subject}").main(argv)
