"""What `forebay bench` runs: one module per subject, each with `main(argv)` that measures, prints and returns.

A subject that needs a run or a target takes the demo's where none is given.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

from forebay.errors import UsageError
from forebay.observe.console import say

SUBJECTS = ("flow", "mixing", "designs", "drafter", "target", "pipeline")
DEMO = Path("runs/demo")


def main(subject: str, argv: Sequence[str]) -> None:
    """Run `bench.SUBJECT.main(argv)`."""
    assert subject in SUBJECTS, subject
    importlib.import_module(f"forebay.bench.{subject}").main(argv)


def of_the_demo(name: str, instead: str) -> str:
    """`config.yaml` or `target` of the demo's run. Raises UsageError where there is none; `instead`: what to give."""
    found = DEMO / name
    if not found.exists():
        raise UsageError(
            f"nothing was given to measure, and there is no {found} of the demo's run here: make it with `make demo` "
            f"in Forebay's sources, or give {instead}"
        )
    say(f"measuring the demo's: {found}")
    return str(found)


def takes_run(parser: argparse.ArgumentParser) -> None:
    """Options of a subject that measures a run: `file` and `overrides`, completed by `given_run`."""
    parser.add_argument(
        "file", nargs="?", help="a run's YAML file; its run_dir is not touched (default: the demo's run)"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value")


def given_run(args: argparse.Namespace) -> None:
    """Make `args.file` the demo's run where none was given. Raises UsageError where there is none."""
    if args.file is None or "=" in args.file:
        args.overrides = [args.file, *args.overrides] if args.file else []
        args.file = of_the_demo("config.yaml", "a run's YAML file")
