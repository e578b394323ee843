"""Errors a user can mend. They print without a traceback: what is wrong, the numbers, the fix.

What only a bug can break is an assertion, not one of these.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ForebayError(Exception):
    """Something the user can mend. `exit_code` is what the command line returns."""

    exit_code = 1


class UsageError(ForebayError):
    """A wrong argument or configuration: found before any work was done."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration that cannot work, refused when it is loaded."""


class DataError(ForebayError):
    """Conversations, tokens or stores that cannot be used as they are."""


class TargetError(ForebayError):
    """The target model is missing, unsupported, or gives states that are wrong."""


class ContractError(ForebayError):
    """Two things that must agree (checkpoint and run, drafter and target, plan and data) do not."""


class PoisonError(ForebayError):
    """A job failed too often and `on_poison` is `stop`."""


class GuardError(ForebayError):
    """The trainer's forward and the serving loop disagree (guarantee G8)."""


class Stopped(Exception):
    """Raised in a waiting thread when the run has failed elsewhere: leave quietly, the first cause is kept."""


def nearest(word: str, known: Iterable[str]) -> str:
    """`` (nearest: 'x')`` for the known word most like `word`, or nothing."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (nearest: '{found[0]}')" if found else ""
