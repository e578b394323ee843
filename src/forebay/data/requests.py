"""The requests of a batch, found by `custom_id`: an answer's row names its request, and the request has the prompt.

Guarantees: memory does not grow with the file (the bodies are kept on disk while rows are read); one id with two bodies
is an error, because an answer would get another's prompt. Called by `data.prepare` and `data.rows`.
"""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

from forebay.data.readers import Unreadable, parse, read
from forebay.errors import DataError


def index_requests(files: list[Path], path: Path) -> int:
    """Write the bodies of all requests in `files` to a database at `path`; returns how many. Raises DataError."""
    count = 0
    with sqlite3.connect(path) as table:
        table.execute("PRAGMA journal_mode = OFF")
        table.execute("CREATE TABLE requests (id TEXT PRIMARY KEY, body TEXT) WITHOUT ROWID")
        for record in read(files):
            row = parse(record.payload)
            place = f"{files[record.file]}:{record.line}"
            if isinstance(row, Unreadable):
                raise DataError(f"{place}: {row.detail}: a request that cannot be read")
            name, body = row.get("custom_id"), row.get("body")
            if not isinstance(name, str) or not isinstance(body, dict):
                raise DataError(f'{place}: no request: a line must be like {{"custom_id": "...", "body": {{...}}}}')
            text = json.dumps(body)
            try:
                table.execute("INSERT INTO requests VALUES (?, ?)", (json.dumps(name), text))
            except sqlite3.IntegrityError:
                known = Requests(table)[name]
                if known != body:
                    raise DataError(
                        f"{place}: custom_id {name!r} is in the requests twice, with different bodies: prepare each "
                        "batch with its own requests"
                    ) from None
                continue
            count += 1
    table.close()
    if not count:
        raise DataError(f"{', '.join(str(file) for file in files)}: no request in it")
    return count


class Requests:
    """The bodies, by custom id."""

    def __init__(self, table: sqlite3.Connection) -> None:
        self._table = table

    @classmethod
    def open(cls, path: str) -> Requests:
        return cls(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True))

    def __getitem__(self, name: Any) -> dict[str, Any] | None:
        found = self._table.execute("SELECT body FROM requests WHERE id = ?", (json.dumps(name),)).fetchone()
        return json.loads(found[0]) if found else None
