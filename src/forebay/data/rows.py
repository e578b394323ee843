"""A record's row -> a conversation, with what only the user can know about the rows: how they are to be read.

Guarantees: the result depends on the record and the settings alone; every record gives a conversation or a reason.
Called by `data.encode`, `data.prepare` and `stages.regenerate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forebay.data.conversation import Conversation, Drop, conversation_of
from forebay.data.layouts import FIELDS, unwrapped
from forebay.data.readers import Record, Unreadable, parse
from forebay.data.requests import Requests
from forebay.errors import UsageError, nearest


@dataclass(frozen=True)
class RowSettings:
    """How rows are to be read. `fields`: a layout's name for a field -> the data's name for it."""

    text_separator: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    requests: str | None = None  # database of `data.requests`

    def __post_init__(self) -> None:
        for name in self.fields:
            if name not in FIELDS | {"text"}:
                raise UsageError(
                    f"--field {name}={self.fields[name]}: no layout has a field {name}{nearest(name, FIELDS)}"
                )


class RowReader:
    """Reads records by the settings."""

    def __init__(self, settings: RowSettings) -> None:
        self.settings = settings
        self._requests = Requests.open(settings.requests) if settings.requests else None

    def row(self, record: Record) -> dict[str, Any] | Drop:
        """The record's row with the layout's names for its fields, an answer with its request."""
        row = parse(record.payload)
        if isinstance(row, Unreadable):
            return Drop(row.reason, row.detail)
        if self.settings.fields:
            row = dict(unwrapped(row))
            row |= {name: row.pop(theirs) for name, theirs in self.settings.fields.items() if theirs in row}
        if self._requests is not None and "custom_id" in row and (body := self._requests[row["custom_id"]]) is not None:
            row = {**row, "request": body}
        return row

    def conversation(self, record: Record) -> Conversation | Drop:
        """What `prepare` trains on."""
        row = self.row(record)
        return row if isinstance(row, Drop) else conversation_of(row, text_separator=self.settings.text_separator)
